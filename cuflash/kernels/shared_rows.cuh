// The heads whose rows of one operand are the same rows, since the operand broadcasts over them.
// Reads the prelude's Params.
#pragma once
#include "numeric.cuh"

// `strides` are the gradient's: 0 along the axes that are summed. `index` counts the others.
struct SharedRows {
    const Params& p;
    const long long* const strides;
    i64 offset;  // of the gradient's rows
    int first, count;

    __device__ __forceinline__ SharedRows(const Params& p, const long long* strides, int index)
        : p(p), strides(strides), offset(0), first(0), count(1) {
        int weight = 1;  // heads from one position of an axis to the next
        for (int axis = p.axes - 1; axis >= 0; --axis) {
            const int size = p.axis_size[axis];
            if (strides[axis] == 0) {
                count *= size;
            } else {
                offset += index % size * strides[axis];
                first += index % size * weight;
                index /= size;
            }
            weight *= size;
        }
    }

    // The i-th of them, in ascending order.
    __device__ __forceinline__ int operator[](int i) const {
        int head = first, weight = 1;
        for (int axis = p.axes - 1; axis >= 0; --axis) {
            const int size = p.axis_size[axis];
            if (strides[axis] == 0) {
                head += i % size * weight;
                i /= size;
            }
            weight *= size;
        }
        return head;
    }
};
