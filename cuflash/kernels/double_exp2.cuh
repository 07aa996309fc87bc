// 2^x in double, without a branch, of several numbers side by side: their terms are independent, so that
// none waits for the one before.
#pragma once

// Turns each x into 2^x, GROUP of them side by side. At most 0.9 ulp; what is not above the smallest
// normal number, 2^-1022, becomes 0.
//
// x = n + f with an integer n and |f| <= 1/2, both exact: adding 3 * 2^51 rounds x to an integer, which
// then is the lower word. 2^f is a polynomial of degree 11, 1 + f g(f), where g interpolates
// (2^f - 1) / f at the Chebyshev points; it is off by less than 2e-17. n is added to its exponent.
template <int GROUP, int COUNT>
__device__ __forceinline__ void exp2_each(double (&x)[COUNT]) {
    constexpr double ROUNDER = 6755399441055744.0;
    constexpr double TERMS[] = {
        4.4549605981865186e-10, 7.072585949269223e-09, 1.0178062445845774e-07,
        1.321544258792169e-06,  1.525273382983612e-05, 0.0001540353044173605,
        0.0013333558146416936,  0.009618129107606888,  0.0555041086648216,
        0.24022650695910097,    0.6931471805599453,    1.0,
    };
    // The upper words of -1022, 1024 and infinity; they grow with a number's size.
    constexpr unsigned int LEAST = 0xc08ff000u, MOST = 0x40900000u, INFINITE = 0x7ff00000u;
    constexpr unsigned int SIGN = 0x80000000u;
    static_assert(COUNT % GROUP == 0, "whole groups");
#pragma unroll
    for (int first = 0; first < COUNT; first += GROUP) {
        double f[GROUP], y[GROUP];
        int n[GROUP];
#pragma unroll
        for (int e = 0; e < GROUP; ++e) {
            const double rounded = x[first + e] + ROUNDER;
            f[e] = x[first + e] - (rounded - ROUNDER), n[e] = __double2loint(rounded);
            y[e] = TERMS[0];
        }
#pragma unroll
        for (int i = 1; i < int(sizeof(TERMS) / sizeof(double)); ++i)
#pragma unroll
            for (int e = 0; e < GROUP; ++e) y[e] = fma(y[e], f[e], TERMS[i]);
#pragma unroll
        for (int e = 0; e < GROUP; ++e) {
            const unsigned int upper = __double2hiint(x[first + e]), size = upper & ~SIGN;
            int high = __double2hiint(y[e]) + (n[e] << 20), low = __double2loint(y[e]);
            if (size >= MOST) high = max(size, INFINITE), low = 0;  // infinity, or NaN as it was
            if (upper - LEAST <= (INFINITE | SIGN) - LEAST) high = low = 0;
            x[first + e] = __hiloint2double(high, low);
        }
    }
}

__device__ __forceinline__ double exp2_of(double x) {
    double y[] = {x};
    exp2_each<1>(y);
    return y[0];
}
