// What score expressions call beside the functions of dual numbers (dual_number.cuh). Stands in the
// prelude of kernels that need it, so it includes nothing.
#pragma once

__device__ __forceinline__ Accumulator score_infinity() {
    return sizeof(Accumulator) == 4 ? Accumulator(__int_as_float(0x7f800000))
                                    : Accumulator(__longlong_as_double(0x7ff0000000000000ll));
}

// An integer as a real number; seams/place.cuh has that of positions.
template <typename T>
__device__ __forceinline__ Accumulator real(T x) {
    return Accumulator(x);
}

// As Python's // and %, which round down; 0 for a divisor of 0, as NumPy.
template <typename A, typename B>
__device__ __forceinline__ auto floor_modulo(A a, B b) -> decltype(a % b) {
    if (b == 0 || b == -1) return 0;
    const auto rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
template <typename A, typename B>
__device__ __forceinline__ auto floor_divide(A a, B b) -> decltype(a % b) {
    if (b == 0) return 0;
    if (b == -1) return -a;
    const auto rest = a % b;
    return a / b - (rest != 0 && (rest < 0) != (b < 0) ? 1 : 0);
}
__device__ __forceinline__ Accumulator floor_modulo(Accumulator a, Accumulator b) {
    const Accumulator rest = fmod(a, b);
    if (rest == Accumulator(0)) return copysign(rest, b);
    return (rest < Accumulator(0)) != (b < Accumulator(0)) ? rest + b : rest;
}
__device__ __forceinline__ Accumulator floor_divide(Accumulator a, Accumulator b) {
    if (b == Accumulator(0)) return a / b;
    const Accumulator quotient = (a - floor_modulo(a, b)) / b, whole = floor(quotient);
    return quotient - whole > Accumulator(0.5) ? whole + Accumulator(1) : whole;
}

// NaN where either is one.
template <typename A, typename B>
__device__ __forceinline__ auto minimum(A a, B b) -> decltype(a + b) {
    return a < b || a != a ? a : b;
}
template <typename A, typename B>
__device__ __forceinline__ auto maximum(A a, B b) -> decltype(a + b) {
    return a > b || a != a ? a : b;
}

// score + x, but -infinity where x is that, whatever the score is; where NaN is found later (Given of
// seams/score_rows.cuh) the sum alone.
template <typename T, typename Given>
__device__ __forceinline__ T add_or_hide(T score, Accumulator x, const Given&) {
    return Given::HIDES_NAN && x == -score_infinity() ? T(x) : score + x;
}
// The same where x is what is differentiated by.
template <typename T, typename Given>
__device__ __forceinline__ T add_variable_or_hide(T score, T x, const Given&) {
    return Given::HIDES_NAN && x.value == -score_infinity() ? T(-score_infinity()) : score + x;
}

// An element as a number of the expression.
__device__ __forceinline__ Accumulator number_of(__half x) { return __half2float(x); }
__device__ __forceinline__ Accumulator number_of(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ Accumulator number_of(float x) { return x; }
__device__ __forceinline__ Accumulator number_of(double x) { return Accumulator(x); }
__device__ __forceinline__ bool number_of(bool x) { return x; }
__device__ __forceinline__ int number_of(signed char x) { return x; }
__device__ __forceinline__ int number_of(unsigned char x) { return x; }
__device__ __forceinline__ int number_of(short x) { return x; }
__device__ __forceinline__ int number_of(unsigned short x) { return x; }
__device__ __forceinline__ int number_of(int x) { return x; }
__device__ __forceinline__ long long number_of(unsigned int x) { return x; }
__device__ __forceinline__ long long number_of(long long x) { return x; }

__device__ __forceinline__ bool is_index(int index, int size) {
    return unsigned(index) < unsigned(size);
}
__device__ __forceinline__ bool is_index(long long index, int size) {
    return index >= 0 && index < size;
}

// ld.global.nc where there is an element, else 0: without a branch, and in the program's order. Loads of
// a whole tile ahead of their use would take more registers than there are.
__device__ __forceinline__ unsigned short load_where(bool exists, const unsigned short* element) {
    unsigned short x = 0;
    asm volatile(
        "{\n"
        ".reg .pred exists;\n"
        "setp.ne.b32 exists, %2, 0;\n"
        "@exists ld.global.nc.b16 %0, [%1];\n"
        "}"
        : "+h"(x)
        : "l"(element), "r"(int(exists)));
    return x;
}
__device__ __forceinline__ unsigned int load_where(bool exists, const unsigned int* element) {
    unsigned int x = 0;
    asm volatile(
        "{\n"
        ".reg .pred exists;\n"
        "setp.ne.b32 exists, %2, 0;\n"
        "@exists ld.global.nc.b32 %0, [%1];\n"
        "}"
        : "+r"(x)
        : "l"(element), "r"(int(exists)));
    return x;
}
__device__ __forceinline__ unsigned long long load_where(bool exists,
                                                         const unsigned long long* element) {
    unsigned long long x = 0;
    asm volatile(
        "{\n"
        ".reg .pred exists;\n"
        "setp.ne.b32 exists, %2, 0;\n"
        "@exists ld.global.nc.b64 %0, [%1];\n"
        "}"
        : "+l"(x)
        : "l"(element), "r"(int(exists)));
    return x;
}
__device__ __forceinline__ unsigned char load_where(bool exists, const unsigned char* element) {
    return exists ? *element : 0;
}

template <int BYTES>
struct BitsOf;
template <>
struct BitsOf<1> {
    using type = unsigned char;
};
template <>
struct BitsOf<2> {
    using type = unsigned short;
};
template <>
struct BitsOf<4> {
    using type = unsigned int;
};
template <>
struct BitsOf<8> {
    using type = unsigned long long;
};

// Where an element of a captured array is, and whether it has such indices. With ADJACENT the elements
// of the last axis lie side by side.
template <bool ADJACENT, typename E, typename... Index>
__device__ __forceinline__ bool find_element(const E*& element, const int* size,
                                             const long long* stride, Index... index) {
    constexpr int LAST = int(sizeof...(Index)) - 1;
    int axis = 0, place = 0;
    ((element += ADJACENT && place == LAST ? (long long)(index) : index * stride[place], ++place),
     ...);
    return (true && ... && is_index(index, size[axis++]));
}

// A row of a captured array: so many elements side by side, none if the array has no such row.
template <typename E>
struct CapturedRow {
    using Bits = typename BitsOf<sizeof(E)>::type;
    using Word = typename BitsOf<2 * sizeof(E)>::type;
    const E* elements;
    int size;

    // The bits of an element, 0 beyond the row.
    __device__ __forceinline__ Bits bits(int index) const {
        return bits_where(is_index(index, size), elements + index);
    }
    static __device__ __forceinline__ Bits bits_where(bool exists, const E* element) {
        return load_where(exists, reinterpret_cast<const Bits*>(element));
    }
    // Two elements, which exist, by one load.
    __device__ __forceinline__ Word word(int index) const {
        return load_where(true, reinterpret_cast<const Word*>(elements + index));
    }
    // Whether `width` elements from an even `index` on exist and pairs of them are words.
    __device__ __forceinline__ bool has_words(int index, int width) const {
        return index + width <= size &&
               reinterpret_cast<unsigned long long>(elements) % sizeof(Word) == 0;
    }
    static __device__ __forceinline__ Accumulator number(Bits bits) {
        return number_of(__builtin_bit_cast(E, bits));
    }
};

// Such rows, one for each query.
template <typename E>
struct CapturedRows {
    const E* elements;
    int rows, size;
    long long stride;  // from row to row

    __device__ __forceinline__ CapturedRow<E> operator[](int row) const {
        return {elements + row * stride, is_index(row, rows) ? size : 0};
    }
    // Whether `count` rows have words.
    __device__ __forceinline__ bool has_words(int row, int count, int index, int width) const {
        const bool exist = row >= 0 && row <= rows - count;
        return exist && stride % 2 == 0 && (*this)[row].has_words(index, width);
    }
};

// Those behind the leading indices, whose next index is the query, and that of a lone row of all queries.
template <typename E, typename... Index>
__device__ __forceinline__ CapturedRows<E> captured_rows(const E* element, const int* size,
                                                         const long long* stride, Index... index) {
    constexpr int AXIS = sizeof...(Index);
    const bool exists = find_element<false>(element, size, stride, index...);
    return {element, exists ? size[AXIS] : 0, size[AXIS + 1], stride[AXIS]};
}
template <typename E, typename... Index>
__device__ __forceinline__ CapturedRows<E> captured_row(const E* element, const int* size,
                                                        const long long* stride, Index... index) {
    const bool exists = find_element<false>(element, size, stride, index...);
    return {element, exists ? 0x7fffffff : 0, size[sizeof...(Index)], 0};
}

// An element of a captured array, 0 for an index that it does not have.
template <bool ADJACENT, typename E, typename... Index>
__device__ __forceinline__ auto captured(const E* element, const int* size, const long long* stride,
                                         Index... index) -> decltype(number_of(*element)) {
    const bool exists = find_element<ADJACENT>(element, size, stride, index...);
    return exists ? number_of(__ldg(element)) : decltype(number_of(*element))(0);
}

// The same, of an element that is another one for each query or key.
template <bool ADJACENT, typename E, typename... Index>
__device__ __forceinline__ auto captured_of_pair(const E* element, const int* size,
                                                 const long long* stride, Index... index)
    -> decltype(number_of(*element)) {
    using Bits = typename BitsOf<sizeof(E)>::type;
    const bool exists = find_element<ADJACENT>(element, size, stride, index...);
    union {
        Bits bits;
        E value;
    } loaded;
    loaded.bits = load_where(exists, reinterpret_cast<const Bits*>(element));
    return number_of(loaded.value);
}
