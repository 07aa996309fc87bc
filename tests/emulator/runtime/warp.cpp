// What the lanes of a warp do together. Each lane parks its operands and stops; the last to arrive
// computes for all. So divergence, wrong masks and exited lanes show at once, with the line.
#include <cmath>

#include "runtime.h"

enum Operation { SYNCWARP = 1, SHUFFLE, VOTE, ELECT, LDMATRIX = 100, STMATRIX = 120, MMA = 200 };

static void complete(Warp& warp, size_t index) {
    Collective collective = warp.open[index];
    warp.open.erase(warp.open.begin() + index);
    if (collective.compute) collective.compute(collective, warp);
    for (int lane = 0; lane < 32; lane++)
        if ((collective.mask >> lane & 1) && lane != current->lane)
            wake(current->block->fibers[current->warp * 32 + lane]);
}

// Exited lanes need not take part in votes, shuffles and __syncwarp; tensor-core instructions need
// all lanes.
void leave_collectives() {
    Warp& warp = current->block->warps[current->warp];
    warp.exited |= 1u << current->lane;
    for (size_t i = warp.open.size(); i--;) {
        Collective& open = warp.open[i];
        if (!(open.mask & warp.exited)) continue;
        if (open.operation >= LDMATRIX)
            fail("WARP DIVERGENCE: lane %d exits while others wait for it at %s:%d", current->lane,
                 open.where.file, open.where.line);
        open.mask &= ~warp.exited;
        if (open.arrived == open.mask) complete(warp, i);
    }
}

void collective(u32 mask, int operation, const char* what, void* argument,
                void (*compute)(Collective&, Warp&), bool same_line) {
    Block& block = *current->block;
    Warp& warp = block.warps[current->warp];
    u32 bit = 1u << current->lane;
    mask &= warp.exist;
    if (!(mask & bit)) fail("%s: the lane is not named in its own mask %08x", what, mask);
    if (operation < LDMATRIX) mask &= ~warp.exited;
    if (mask & warp.exited)
        fail("WARP DIVERGENCE: %s with exited lanes %08x", what, mask & warp.exited);
    if (operation >= LDMATRIX && mask != 0xffffffffu) fail("%s needs a warp of 32 lanes", what);
    Collective* joined = nullptr;
    for (auto& open : warp.open) {
        // Lanes may meet in a smaller group first, unless each side waits for the other.
        if (open.mask == mask)
            joined = &open;
        else if ((open.mask & bit) && (open.arrived & mask))
            fail(
                "WARP DIVERGENCE: %s with mask %08x while lanes of it wait at %s:%d with mask %08x",
                what, mask, open.where.file, open.where.line, open.mask);
    }
    if (joined &&
        (joined->operation != operation || (same_line && !(joined->where == current->where))))
        fail("WARP DIVERGENCE: %s while other lanes are at %s:%d", what, joined->where.file,
             joined->where.line);
    if (!joined) {
        warp.open.push_back({mask, 0, operation, current->where, compute, {}});
        joined = &warp.open.back();
    }
    joined->arrived |= bit;
    joined->arguments[current->lane] = argument;
    if (joined->arrived == mask)
        complete(warp, joined - warp.open.data());
    else
        block_here(what);
}

// ---------------------------------------------------------------------------- votes and shuffles
extern "C" void emu_syncwarp(u32 mask, emu_where where) {
    ENTER(where);
    collective(
        mask, SYNCWARP, "__syncwarp", nullptr,
        [](Collective& c, Warp&) {
            if (!checking) return;
            std::vector<int> lanes;
            for (int lane = 0; lane < 32; lane++)
                if (c.mask >> lane & 1) lanes.push_back(current->warp * 32 + lane);
            synchronise(*current->block, lanes, lanes);
        },
        false);
}

struct ShuffleArguments {
    u64 value, result;
    int source, kind, width;
};
static int shuffle_source(const ShuffleArguments& s, int lane) {
    int base = lane & ~(s.width - 1), from = lane;
    switch (s.kind) {
        case 0:
            return base + (s.source & (s.width - 1));
        case 1:
            from = lane - s.source;
            return from < base ? lane : from;
        case 2:
            from = lane + s.source;
            return from >= base + s.width ? lane : from;
        default:
            from = lane ^ s.source;
            return from >= base + s.width ? lane : from;
    }
}
extern "C" u64 emu_shuffle(u32 mask, u64 value, int source, int kind, int width, emu_where where) {
    ENTER(where);
    ShuffleArguments s{value, 0, source, kind, width};
    if (width < 1 || width > 32 || (width & (width - 1)))
        fail("shuffle width %d is not a power of two up to 32", width);
    collective(
        mask, SHUFFLE, "__shfl_sync", &s,
        [](Collective& c, Warp&) {
            for (int lane = 0; lane < 32; lane++) {
                if (!(c.mask >> lane & 1)) continue;
                auto& mine = *(ShuffleArguments*)c.arguments[lane];
                int from = shuffle_source(mine, lane);
                if (from < 0 || from > 31 || !(c.mask >> from & 1))
                    fail("shuffle: lane %d reads lane %d, which is not in mask %08x", lane, from,
                         c.mask);
                mine.result = ((ShuffleArguments*)c.arguments[from])->value;
            }
        },
        false);
    return s.result;
}

struct VoteArguments {
    int predicate, kind;
    u32 result;
};
extern "C" u32 emu_vote(u32 mask, int predicate, int kind, emu_where where) {
    ENTER(where);
    VoteArguments v{predicate, kind, 0};
    collective(
        mask, VOTE + 10 * kind, "vote", &v,
        [](Collective& c, Warp&) {
            u32 ballot = 0, sum = 0;
            for (int lane = 0; lane < 32; lane++)
                if (c.mask >> lane & 1) {
                    int p = ((VoteArguments*)c.arguments[lane])->predicate;
                    ballot |= (u32)(p != 0) << lane;
                    sum += p;
                }
            for (int lane = 0; lane < 32; lane++)
                if (c.mask >> lane & 1) {
                    auto& mine = *(VoteArguments*)c.arguments[lane];
                    mine.result = mine.kind == 0   ? ballot
                                  : mine.kind == 1 ? ballot != 0
                                  : mine.kind == 2 ? ballot == c.mask
                                                   : sum;
                }
        },
        false);
    return v.result;
}
extern "C" int emu_elect(u32 mask, emu_where where) {
    ENTER(where);
    int elected = 0;
    collective(
        mask, ELECT, "elect.sync", &elected,
        [](Collective& c, Warp&) { *(int*)c.arguments[__builtin_ctz(c.mask)] = 1; }, false);
    return elected;
}

// ---------------------------------------------------------------------------- ldmatrix, stmatrix
struct MatrixArguments {
    u32 address;
    u32* registers;
    int count, transpose;
};
// Extra cycles because rows of one 8x8 matrix lie in the same banks (16 bytes each, 8 per cycle).
static int bank_conflicts(Collective& c, int matrix) {
    int used[8] = {}, most = 1;
    for (int row = 0; row < 8; row++) {
        u32 address = ((MatrixArguments*)c.arguments[matrix * 8 + row])->address;
        bool repeated = false;
        for (int k = 0; k < row; k++)
            repeated |= ((MatrixArguments*)c.arguments[matrix * 8 + k])->address == address;
        if (!repeated && ++used[address / 16 % 8] > most) most = used[address / 16 % 8];
    }
    return most - 1;
}
extern "C" void emu_load_matrix(u32 address, u32* registers, int count, int transpose,
                                emu_where where) {
    ENTER(where);
    MatrixArguments m{address, registers, count, transpose};
    stats.ldmatrix += current->lane == 0;
    if (current->lane < 8 * count)
        check_access(shared_at(address, 16, 16, "ldmatrix row"), 16, READ, current->caller);
    collective(
        0xffffffffu, LDMATRIX + count * 2 + transpose, "ldmatrix", &m,
        [](Collective& c, Warp&) {
            MatrixArguments& first = *(MatrixArguments*)c.arguments[0];
            for (int j = 0; j < first.count; j++) {
                u16 matrix[8][8];
                for (int row = 0; row < 8; row++) {
                    u32 a = ((MatrixArguments*)c.arguments[j * 8 + row])->address;
                    memcpy(matrix[row], current->block->shared + (a - SHARED_BASE), 16);
                }
                stats.bank_conflicts += bank_conflicts(c, j);
                for (int lane = 0; lane < 32; lane++) {
                    int row = lane / 4, column = 2 * (lane % 4);
                    ((MatrixArguments*)c.arguments[lane])->registers[j] =
                        first.transpose ? matrix[column][row] | (u32)matrix[column + 1][row] << 16
                                        : matrix[row][column] | (u32)matrix[row][column + 1] << 16;
                }
            }
        },
        true);
}
extern "C" void emu_store_matrix(u32 address, const u32* registers, int count, int transpose,
                                 emu_where where) {
    ENTER(where);
    MatrixArguments m{address, (u32*)registers, count, transpose};
    stats.stmatrix += current->lane == 0;
    if (current->lane < 8 * count)
        check_access(shared_at(address, 16, 16, "stmatrix row"), 16, WRITE, current->caller);
    collective(
        0xffffffffu, STMATRIX + count * 2 + transpose, "stmatrix", &m,
        [](Collective& c, Warp&) {
            MatrixArguments& first = *(MatrixArguments*)c.arguments[0];
            for (int j = 0; j < first.count; j++) {
                u16 matrix[8][8];
                for (int lane = 0; lane < 32; lane++) {
                    u32 pair = ((MatrixArguments*)c.arguments[lane])->registers[j];
                    int row = lane / 4, column = 2 * (lane % 4);
                    for (int e = 0; e < 2; e++) {
                        u16 value = (u16)(pair >> 16 * e);
                        if (first.transpose)
                            matrix[column + e][row] = value;
                        else
                            matrix[row][column + e] = value;
                    }
                }
                stats.bank_conflicts += bank_conflicts(c, j);
                for (int row = 0; row < 8; row++) {
                    u32 a = ((MatrixArguments*)c.arguments[j * 8 + row])->address;
                    memcpy(current->block->shared + (a - SHARED_BASE), matrix[row], 16);
                }
            }
        },
        true);
}

// ---------------------------------------------------------------------------- mma.sync
// Kinds are numbered as in translate.py. Fragment layouts are those of the PTX manual: lane l holds
// row l/4 (and l/4 + 8), columns from l%4.
enum MmaInput { F16, BF16, TF32, F64 };
struct MmaShape {
    MmaInput input;
    int m, k;
};
static const MmaShape MMA_SHAPES[] = {
    {F16, 16, 16}, {BF16, 16, 16}, {F16, 16, 8}, {BF16, 16, 8}, {TF32, 16, 8},
    {TF32, 16, 4}, {F64, 8, 4},    {F64, 16, 4}, {F64, 16, 8},  {F64, 16, 16},
};
struct MmaArguments {
    void* d;
    const void *a, *b, *c;
};
// tf32 ignores the low 13 bits of its operands (seen on an H200).
static float tf32_to_float(u32 bits) {
    bits &= 0xffffe000u;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static void unpack_fragments(const MmaShape& shape, const Collective& c, float (*A)[16],
                             float (*B)[8]) {
    auto widen = shape.input == BF16 ? bfloat16_to_float : half_to_float;
    for (int lane = 0; lane < 32; lane++) {
        auto& s = *(MmaArguments*)c.arguments[lane];
        auto *a = (const u32*)s.a, *b = (const u32*)s.b;
        int group = lane / 4, t = lane % 4;
        if (shape.input == TF32) {
            for (int i = 0; i < shape.k / 2; i++)
                A[group + 8 * (i % 2)][t + 4 * (i / 2)] = tf32_to_float(a[i]);
            for (int i = 0; i < shape.k / 4; i++) B[t + 4 * i][group] = tf32_to_float(b[i]);
            continue;
        }
        for (int e = 0; e < 2; e++) {
            for (int i = 0; i < shape.k / 4; i++)
                A[group + 8 * (i % 2)][2 * t + e + 8 * (i / 2)] = widen((u16)(a[i] >> 16 * e));
            for (int i = 0; i < shape.k / 8; i++)
                B[2 * t + e + 8 * i][group] = widen((u16)(b[i] >> 16 * e));
        }
    }
}
static void multiply_float(const MmaShape& shape, Collective& c) {
    float A[16][16], B[16][8], product[16][8];
    unpack_fragments(shape, c, A, B);
    for (int row = 0; row < 16; row++) {
        float sum[8] = {};
        for (int k = 0; k < shape.k; k++)
            for (int column = 0; column < 8; column++) sum[column] += A[row][k] * B[k][column];
        memcpy(product[row], sum, sizeof sum);
    }
    for (int lane = 0; lane < 32; lane++) {
        auto& s = *(MmaArguments*)c.arguments[lane];
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
            float before = ((const float*)s.c)[i];
            ((float*)s.d)[i] = truncates && shape.k == 16
                                   ? truncated_sum(before, A[row], B[0] + column, 8)
                                   : before + product[row][column];
        }
    }
}
static void multiply_double(const MmaShape& shape, Collective& c) {
    double A[16][16] = {}, B[16][8];
    int rows = shape.m / 8;
    for (int lane = 0; lane < 32; lane++) {
        auto& s = *(MmaArguments*)c.arguments[lane];
        int group = lane / 4, t = lane % 4;
        for (int i = 0; i < rows * shape.k / 4; i++)
            A[group + 8 * (i % rows)][t + 4 * (i / rows)] = ((const double*)s.a)[i];
        for (int i = 0; i < shape.k / 4; i++) B[t + 4 * i][group] = ((const double*)s.b)[i];
    }
    for (int lane = 0; lane < 32; lane++) {
        auto& s = *(MmaArguments*)c.arguments[lane];
        for (int i = 0; i < 2 * rows; i++) {
            double x = ((const double*)s.c)[i];
            for (int k = 0; k < shape.k; k++)
                x = fma(A[lane / 4 + 8 * (i / 2)][k], B[k][2 * (lane % 4) + i % 2], x);
            ((double*)s.d)[i] = x;
        }
    }
}
extern "C" void emu_mma(int kind, void* d, const void* a, const void* b, const void* c,
                        emu_where where) {
    ENTER(where);
    MmaArguments m{d, a, b, c};
    stats.mma += current->lane == 0;
    collective(
        0xffffffffu, MMA + kind, "mma.sync", &m,
        [](Collective& c, Warp&) {
            const MmaShape& shape = MMA_SHAPES[c.operation - MMA];
            if (shape.input == F64)
                multiply_double(shape, c);
            else
                multiply_float(shape, c);
        },
        true);
}
