// 2^x in double, without a branch: so that those of many scores run side by side, and beside products.
#pragma once

// At most 0.9 ulp. What is below the smallest normal number, 2^-1022, becomes 0.
//
// x = n + f with an integer n and |f| <= 1/2, both exact: adding 3 * 2^51 rounds x to an integer, which
// then is the lower word. 2^f is a polynomial of degree 11, 1 + f g(f), where g interpolates
// (2^f - 1) / f at the Chebyshev points; it is off by less than 2e-17. n is added to its exponent.
__device__ __forceinline__ double exp2_of(double x) {
    constexpr double ROUNDER = 6755399441055744.0;
    constexpr double TERMS[] = {
        4.4549605981865186e-10, 7.072585949269223e-09, 1.0178062445845774e-07,
        1.321544258792169e-06,  1.525273382983612e-05, 0.0001540353044173605,
        0.0013333558146416936,  0.009618129107606888,  0.0555041086648216,
        0.24022650695910097,    0.6931471805599453,    1.0,
    };
    const double rounded = x + ROUNDER, f = x - (rounded - ROUNDER);
    double y = TERMS[0];
#pragma unroll
    for (int i = 1; i < int(sizeof(TERMS) / sizeof(double)); ++i) y = fma(y, f, TERMS[i]);

    // The upper words of -1022, 1024 and infinity; they grow with a number's size.
    constexpr unsigned int LEAST = 0xc08ff000u, MOST = 0x40900000u, INFINITE = 0x7ff00000u;
    constexpr unsigned int SIGN = 0x80000000u;
    const unsigned int upper = __double2hiint(x), size = upper & ~SIGN;
    int high = __double2hiint(y) + (__double2loint(rounded) << 20), low = __double2loint(y);
    if (size >= MOST) high = max(size, INFINITE), low = 0;  // infinity, or NaN as it was
    if (upper - LEAST <= (INFINITE | SIGN) - LEAST) high = low = 0;
    return __hiloint2double(high, low);
}
