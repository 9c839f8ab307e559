/* Block quantisation on a CPU: the same bits as blockwise.py, which defines what is computed.
 *
 * Each block is processed while it is in the first-level cache. Loops are simple, so that the
 * compiler vectorises them; -ffp-contract=off prevents fused multiply-adds.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define MAX_BLOCK_ELEMENTS 8192 /* the limit of CollectivesConfig.block_elements */
#define SMALLEST_SCALE 0x1p-126f
#define ROUNDER 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer, halves to even */
#define ROUNDER_BITS 0x4B400000

enum { FP32 = 0, BF16 = 1 }; /* dtypes */

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

static void round_stochastic(const float *x, int n, float inverse, float limit, uint32_t first,
                             uint32_t seed, int8_t *q) {
    for (int i = 0; i < n; i++) {
        float moved = x[i] * inverse + noise(first + (uint32_t)i, seed);
        float low = floorf(moved);
        low = low > limit ? limit : low;
        low = low < -limit ? -limit : low;
        q[i] = (int8_t)(int32_t)low;
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

/* Return the block as floats: in place if it is fp32 without residual, else converted in copy. */
static const float *load(const void *values, int dtype, const uint16_t *residual, int64_t first,
                         int n, float *copy) {
    if (dtype == FP32) {
        const float *x = (const float *)values + first;
        if (!residual)
            return x;
        for (int i = 0; i < n; i++)
            copy[i] = x[i] + from_bf16(residual[first + i]);
    } else {
        const uint16_t *x = (const uint16_t *)values + first;
        for (int i = 0; i < n; i++)
            copy[i] = from_bf16(x[i]);
        if (residual)
            for (int i = 0; i < n; i++)
                copy[i] = copy[i] + from_bf16(residual[first + i]);
    }
    return copy;
}

/* Overwrite the residual with the rounding errors of a block. */
static void store_errors(const float *x, const int8_t *q, int n, float scale,
                         uint16_t *residual) {
    for (int i = 0; i < n; i++) {
        float lost = x[i] - (float)q[i] * scale;
        residual[i] = isfinite(lost) ? to_bf16(lost) : 0;
    }
}

/* The functions below are called by native_blockwise.py; blockwise.py documents their arguments.
 * `block` is the number of elements per block, and dtypes are FP32 or BF16. */
void frontier_quantise(const void *values, int dtype, int64_t n, int64_t block, int bits,
                       int scale_dtype, int stochastic, uint32_t seed, uint16_t *residual,
                       void *scales, uint8_t *packed) {
    float copy[MAX_BLOCK_ELEMENTS];
    int8_t q[MAX_BLOCK_ELEMENTS];
    float limit = bits == 8 ? 127.0f : 7.0f;
    for (int64_t first = 0, index = 0; first < n; first += block, index++) {
        int count = (int)(n - first < block ? n - first : block);
        const float *x = load(values, dtype, residual, first, count, copy);
        float scale = scale_of(largest_magnitude(x, count), limit, scale_dtype);
        int usable = scale > 0.0f && isfinite(scale);
        int8_t *integers = bits == 8 ? (int8_t *)packed : q;
        if (!usable)
            memset(integers, 0, (size_t)count);
        else if (stochastic)
            round_stochastic(x, count, 1.0f / scale, limit, (uint32_t)first, seed, integers);
        else
            round_nearest(x, count, 1.0f / scale, integers);
        if (bits == 4)
            pack_4(q, count, (int)block / 2, packed);
        if (residual)
            store_errors(x, integers, count, scale, residual + first);
        if (scale_dtype == FP32)
            ((float *)scales)[index] = scale;
        else
            ((uint16_t *)scales)[index] = (uint16_t)((uint32_t)bits_of(scale) >> 16);
        packed += block * bits / 8;
    }
}

static inline float scale_at(const void *scales, int dtype, int64_t index) {
    return dtype == FP32 ? ((const float *)scales)[index]
                        : from_bf16(((const uint16_t *)scales)[index]);
}

/* Return a block's integers: in place if they have 8 bits, else unpacked in the last argument. */
static const int8_t *integers_of(const uint8_t *packed, int n, int half, int bits,
                                 int8_t *unpacked) {
    if (bits == 8)
        return (const int8_t *)packed;
    unpack_4(packed, n, half, unpacked);
    return unpacked;
}

void frontier_dequantise(const void *scales, int scale_dtype, const uint8_t *packed, int64_t n,
                         int64_t block, int bits, void *out, int dtype) {
    int8_t q[MAX_BLOCK_ELEMENTS];
    for (int64_t first = 0, index = 0; first < n; first += block, index++) {
        int count = (int)(n - first < block ? n - first : block);
        float scale = scale_at(scales, scale_dtype, index);
        const int8_t *integers = integers_of(packed, count, (int)block / 2, bits, q);
        if (dtype == BF16) {
            uint16_t *target = (uint16_t *)out + first;
            for (int i = 0; i < count; i++)
                target[i] = to_bf16((float)integers[i] * scale);
        } else {
            float *target = (float *)out + first;
            for (int i = 0; i < count; i++)
                target[i] = (float)integers[i] * scale;
        }
        packed += block * bits / 8;
    }
}

/* Strides are in bytes. All ranks' values of a block are added while its sum is in the cache. */
void frontier_add_up(const uint8_t *scales, int64_t scales_stride, int scale_dtype,
                     const uint8_t *packed, int64_t packed_stride, int ranks, int skip,
                     int64_t n, int64_t block, int bits, float *total) {
    int8_t q[MAX_BLOCK_ELEMENTS];
    for (int64_t first = 0, index = 0; first < n; first += block, index++) {
        int count = (int)(n - first < block ? n - first : block);
        float *target = total + first;
        for (int rank = 0; rank < ranks; rank++) {
            if (rank == skip)
                continue;
            float scale = scale_at(scales + rank * scales_stride, scale_dtype, index);
            const int8_t *integers =
                integers_of(packed + rank * packed_stride, count, (int)block / 2, bits, q);
            for (int i = 0; i < count; i++)
                target[i] += (float)integers[i] * scale;
        }
        packed += block * bits / 8;
    }
}
