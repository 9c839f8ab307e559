/* Block quantisation on a CPU; blockwise.py says what it computes, and must get the same bits.
 *
 * A block is worked on while it lies in the first-level cache. The loops are plain, so that the
 * compiler makes vectors of them; -ffp-contract=off keeps products and sums apart.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define MOST_ELEMENTS 8192 /* of a block: CollectivesConfig.block_elements */
#define SMALLEST_SCALE 0x1p-126f
#define ROUNDER 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer, halves to even */
#define ROUNDER_BITS 0x4B400000

enum { FP32 = 0, BF16 = 1 };

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

/* The element's number is hashed with the seed: uniform() of blockwise.py. */
static inline float noise(uint32_t number, uint32_t seed) {
    uint32_t x = number * 0x9E3779B9u + seed;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    x ^= x >> 16;
    return (float)(int32_t)(x >> 8) * 0x1p-24f;
}

/* Bits of magnitudes order like the numbers, with NaN above infinity. */
static float largest_magnitude(const float *x, int n) {
    int32_t most = 0;
    for (int i = 0; i < n; i++) {
        int32_t bits = bits_of(x[i]) & 0x7FFFFFFF;
        most = bits > most ? bits : most;
    }
    return float_of(most);
}

static float scale_of(float largest, float largest_integer, int scale_kind) {
    if (!isfinite(largest))
        return INFINITY;
    float scale = largest * (1.0f / largest_integer);
    if (scale_kind == BF16)
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

static void pack_4(const int8_t *q, int n, uint8_t *packed) {
    int half = (n + 1) / 2, rest = n - half;
    for (int i = 0; i < rest; i++)
        packed[i] = (uint8_t)((q[i] & 15) | (uint8_t)(q[half + i] << 4));
    if (rest < half)
        packed[rest] = (uint8_t)(q[rest] & 15);
}

static void unpack_4(const uint8_t *packed, int n, int8_t *q) {
    int half = (n + 1) / 2, rest = n - half;
    for (int i = 0; i < half; i++)
        q[i] = (int8_t)((int8_t)(packed[i] << 4) >> 4);
    for (int i = 0; i < rest; i++)
        q[half + i] = (int8_t)((int8_t)packed[i] >> 4);
}

/* Return the block as floats: where it lies, or a copy with the residual added. */
static const float *load(const void *values, int kind, const uint16_t *residual, int64_t first,
                         int n, float *copy) {
    if (kind == FP32) {
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

static void keep_lost(const float *x, const int8_t *q, int n, float scale, uint16_t *residual) {
    for (int i = 0; i < n; i++) {
        float lost = x[i] - (float)q[i] * scale;
        residual[i] = isfinite(lost) ? to_bf16(lost) : 0;
    }
}

void frontier_quantise(const void *values, int kind, int64_t n, int64_t block, int bits,
                       int scale_kind, int stochastic, uint32_t seed, uint16_t *residual,
                       void *scales, uint8_t *packed) {
    float copy[MOST_ELEMENTS];
    int8_t q[MOST_ELEMENTS];
    float limit = bits == 8 ? 127.0f : 7.0f;
    for (int64_t first = 0, index = 0; first < n; first += block, index++) {
        int here = (int)(n - first < block ? n - first : block);
        const float *x = load(values, kind, residual, first, here, copy);
        float scale = scale_of(largest_magnitude(x, here), limit, scale_kind);
        int usable = scale > 0.0f && isfinite(scale);
        int8_t *integers = bits == 8 ? (int8_t *)packed : q;
        if (!usable)
            memset(integers, 0, (size_t)here);
        else if (stochastic)
            round_stochastic(x, here, 1.0f / scale, limit, (uint32_t)first, seed, integers);
        else
            round_nearest(x, here, 1.0f / scale, integers);
        if (bits == 4)
            pack_4(q, here, packed);
        if (residual)
            keep_lost(x, integers, here, scale, residual + first);
        if (scale_kind == FP32)
            ((float *)scales)[index] = scale;
        else
            ((uint16_t *)scales)[index] = (uint16_t)((uint32_t)bits_of(scale) >> 16);
        packed += (here * bits + 7) / 8;
    }
}

static inline float scale_at(const void *scales, int kind, int64_t index) {
    return kind == FP32 ? ((const float *)scales)[index]
                        : from_bf16(((const uint16_t *)scales)[index]);
}

/* Return a block's integers: where they lie, or unpacked. */
static const int8_t *integers_of(const uint8_t *packed, int n, int bits, int8_t *unpacked) {
    if (bits == 8)
        return (const int8_t *)packed;
    unpack_4(packed, n, unpacked);
    return unpacked;
}

void frontier_dequantise(const void *scales, int scale_kind, const uint8_t *packed, int64_t n,
                         int64_t block, int bits, void *out, int kind) {
    int8_t q[MOST_ELEMENTS];
    for (int64_t first = 0, index = 0; first < n; first += block, index++) {
        int here = (int)(n - first < block ? n - first : block);
        float scale = scale_at(scales, scale_kind, index);
        const int8_t *integers = integers_of(packed, here, bits, q);
        if (kind == BF16) {
            uint16_t *home = (uint16_t *)out + first;
            for (int i = 0; i < here; i++)
                home[i] = to_bf16((float)integers[i] * scale);
        } else {
            float *home = (float *)out + first;
            for (int i = 0; i < here; i++)
                home[i] = (float)integers[i] * scale;
        }
        packed += (here * bits + 7) / 8;
    }
}

/* Strides in bytes. A block of the sum stays in the cache until all ranks are in it. */
void frontier_add_up(const uint8_t *scales, int64_t scales_stride, int scale_kind,
                     const uint8_t *packed, int64_t packed_stride, int ranks, int left_out,
                     int64_t n, int64_t block, int bits, float *total) {
    int8_t q[MOST_ELEMENTS];
    for (int64_t first = 0, index = 0; first < n; first += block, index++) {
        int here = (int)(n - first < block ? n - first : block);
        float *home = total + first;
        for (int rank = 0; rank < ranks; rank++) {
            if (rank == left_out)
                continue;
            float scale = scale_at(scales + rank * scales_stride, scale_kind, index);
            const int8_t *integers = integers_of(packed + rank * packed_stride, here, bits, q);
            for (int i = 0; i < here; i++)
                home[i] += (float)integers[i] * scale;
        }
        packed += (here * bits + 7) / 8;
    }
}
