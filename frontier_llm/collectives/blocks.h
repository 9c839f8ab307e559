/* Parts of the kernels of blockwise.c: numbers, rounding, packing, and the rotation of blocks.
 *
 * Loops are simple, so that the compiler vectorises them.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define MAX_BLOCK_ELEMENTS 8192 /* the limit of CollectivesConfig.block_elements */
#define SMALLEST_SCALE 0x1p-126f
#define ROUNDER 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer, halves to even */
#define ROUNDER_BITS 0x4B400000

enum { FP32 = 0, BF16 = 1 }; /* dtypes */

/* The format of a message; native_blockwise.py has the same fields. */
typedef struct {
    int64_t block;       /* elements per block */
    int32_t bits;        /* 8 or 4 */
    int32_t scale_dtype; /* FP32 or BF16 */
    int32_t stochastic;  /* whether rounding is stochastic */
    int32_t run;         /* elements per run that is rotated, at least 16; 0 = none */
    float factor;        /* 1 / sqrt(run) */
} Format;

static inline int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float float_of(int32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline float from_bf16(uint16_t x) { return float_of((int32_t)((uint32_t)x << 16)); }

static inline uint16_t to_bf16(float x) {
    uint32_t bits = (uint32_t)bits_of(x);
    uint16_t rounded = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    return x != x ? 0x7FC0 : rounded;
}

/* Hash the element's index and the seed to a number in [0, 1): uniform() of blockwise.py. */
static inline float noise(uint32_t index, uint32_t seed) {
    uint32_t x = index * 0x9E3779B9u + seed;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    x ^= x >> 16;
    return (float)(int32_t)(x >> 8) * 0x1p-24f;
}

/* A vector of VECTOR values and its bits. Operations on vectors that the processor does not have are
 * compiled to several smaller ones. */
#define VECTOR 16
typedef float Vector __attribute__((vector_size(4 * VECTOR)));
typedef int32_t Bits __attribute__((vector_size(4 * VECTOR)));

/* The indices of the lanes that lie a stride apart. */
#define PARTNERS(s)                                                                               \
    0 ^ s, 1 ^ s, 2 ^ s, 3 ^ s, 4 ^ s, 5 ^ s, 6 ^ s, 7 ^ s, 8 ^ s, 9 ^ s, 10 ^ s, 11 ^ s, 12 ^ s,  \
        13 ^ s, 14 ^ s, 15 ^ s
#ifdef __clang__
#define SWAP(v, s) __builtin_shufflevector(v, v, PARTNERS(s))
#else
#define SWAP(v, s) __builtin_shuffle(v, (Bits){PARTNERS(s)})
#endif

/* Replace the pairs (a, b) of a vector that lie a stride apart by (a + b, a - b): add the partner
 * to each lane, after the sign of each b was changed. */
#define PAIRS(v, s) (SWAP(v, s) + (Vector)((Bits)(v) ^ (((lanes & s) != 0) & sign)))

/* Multiply each run by the Walsh-Hadamard matrix, then by a factor; n is a multiple of `run`. Strides
 * within a vector come first, then two strides per pass over the block, and one if a single one is
 * left. The last pass multiplies by the factor, the others by 1. `x` may be `source`. */
static void transform(const float *source, float *x, int n, int run, float factor) {
    const Bits lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int32_t sign = INT32_MIN;
    int stride = VECTOR;
    float f = stride == run ? factor : 1.0f;
    for (int i = 0; i < n; i += VECTOR) {
        Vector v;
        memcpy(&v, source + i, sizeof v);
        v = PAIRS(v, 1);
        v = PAIRS(v, 2);
        v = PAIRS(v, 4);
        v = PAIRS(v, 8) * f;
        memcpy(x + i, &v, sizeof v);
    }
    for (; 2 * stride < run; stride *= 4) {
        f = 4 * stride == run ? factor : 1.0f;
        for (int first = 0; first < n; first += 4 * stride)
            for (int i = first; i < first + stride; i++) {
                float a = x[i], b = x[i + stride];
                float c = x[i + 2 * stride], d = x[i + 3 * stride];
                float ab = a + b, cd = c + d, a_b = a - b, c_d = c - d;
                x[i] = (ab + cd) * f;
                x[i + stride] = (a_b + c_d) * f;
                x[i + 2 * stride] = (ab - cd) * f;
                x[i + 3 * stride] = (a_b - c_d) * f;
            }
    }
    if (stride < run)
        for (int first = 0; first < n; first += 2 * stride)
            for (int i = first; i < first + stride; i++) {
                float a = x[i], b = x[i + stride];
                x[i] = (a + b) * factor;
                x[i + stride] = (a - b) * factor;
            }
}

/* Return how many of n values are in full runs. */
static int rotated_of(int n, const Format *f) { return f->run ? n & -f->run : 0; }

/* Write a block of n values, with its full runs rotated, to x, which may be `source`. */
static void rotate(const float *source, float *x, int n, const Format *f) {
    int rotated = rotated_of(n, f);
    transform(source, x, rotated, f->run, f->factor);
    if (x != source)
        memcpy(x + rotated, source + rotated, (size_t)(n - rotated) * sizeof *x);
}

/* Compares bits as integers: they order like the magnitudes, with NaN above infinity. */
static float largest_magnitude(const float *x, int n) {
    int32_t largest_bits = 0;
    for (int i = 0; i < n; i++) {
        int32_t bits = bits_of(x[i]) & 0x7FFFFFFF;
        largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    return float_of(largest_bits);
}

/* Return the scale of a block. A scale in bf16 is rounded up: bf16 is the upper 16 bits of fp32. */
static float scale_of(float largest, float largest_integer, int scale_dtype) {
    if (!isfinite(largest))
        return INFINITY;
    float scale = largest * (1.0f / largest_integer);
    if (scale_dtype == BF16)
        scale = float_of((bits_of(scale) + 0xFFFF) & ~0xFFFF);
    return scale < SMALLEST_SCALE ? 0.0f : scale;
}

static void round_nearest(const float *x, int n, float inverse, int8_t *q) {
    for (int i = 0; i < n; i++) {
        float ratio = x[i] * inverse;
        q[i] = (int8_t)(bits_of(ratio + ROUNDER) - ROUNDER_BITS);
    }
}

/* Ratios are finite and small, so that their integral parts are integers of 32 bits. */
static void round_stochastic(const float *x, int n, float inverse, int32_t limit, uint32_t first,
                             uint32_t seed, int8_t *q) {
    for (int i = 0; i < n; i++) {
        float moved = x[i] * inverse + noise(first + (uint32_t)i, seed);
        int32_t low = (int32_t)moved;
        low -= (float)low > moved; /* towards 0 was up for a negative number */
        low = low > limit ? limit : low;
        low = low < -limit ? -limit : low;
        q[i] = (int8_t)low;
    }
}

/* Write two 4-bit integers per byte: q[i] in the low bits, q[half + i] in the high bits. `half` is
 * half a full block; the n elements may be fewer. */
static void pack_4(const int8_t *q, int n, int half, uint8_t *packed) {
    int low = n < half ? n : half, rest = n - low;
    for (int i = 0; i < rest; i++)
        packed[i] = (uint8_t)((q[i] & 15) | (uint8_t)(q[half + i] << 4));
    for (int i = rest; i < low; i++)
        packed[i] = (uint8_t)(q[i] & 15);
}

static void unpack_4(const uint8_t *packed, int n, int half, int8_t *q) {
    int low = n < half ? n : half, rest = n - low;
    for (int i = 0; i < low; i++)
        q[i] = (int8_t)((int8_t)(packed[i] << 4) >> 4);
    for (int i = 0; i < rest; i++)
        q[half + i] = (int8_t)((int8_t)packed[i] >> 4);
}
