/* Block quantisation on a CPU: the same bits as blockwise.py, which defines what is computed.
 *
 * Each block is processed while it is in the first-level cache. The flag -ffp-contract=off prevents
 * fused multiply-adds.
 */
#include "blocks.h"

/* The rounding errors of a part; native_blockwise.py has the same fields. */
typedef struct {
    void *values;        /* int8 if there are scales, else bf16 */
    void *scales;        /* one per block, or null */
    int32_t scale_dtype; /* FP32 or BF16 */
    int32_t has_decay;   /* whether the next residual depends on the old one */
    float old_weight;    /* of the old residual in the next one */
    float new_weight;    /* of the new rounding error */
} Residual;

/* Add a block of another buffer, times a sign, to x. */
static void accumulate(float *x, const void *values, int dtype, int64_t first, int n, float sign) {
    if (dtype == FP32) {
        const float *y = (const float *)values + first;
        for (int i = 0; i < n; i++)
            x[i] += sign * y[i];
    } else {
        const uint16_t *y = (const uint16_t *)values + first;
        for (int i = 0; i < n; i++)
            x[i] += sign * from_bf16(y[i]);
    }
}

/* Return the block to quantise, without its residual: in place if it is fp32 without base and
 * residual, else computed in copy. */
static const float *load(const void *values, int dtype, const void *base, int base_dtype,
                         int needs_copy, int64_t first, int n, float *copy) {
    if (dtype == FP32) {
        const float *x = (const float *)values + first;
        if (!needs_copy)
            return x;
        memcpy(copy, x, (size_t)n * sizeof *x);
    } else {
        const uint16_t *x = (const uint16_t *)values + first;
        for (int i = 0; i < n; i++)
            copy[i] = from_bf16(x[i]);
    }
    if (base)
        accumulate(copy, base, base_dtype, first, n, -1.0f);
    return copy;
}

/* Write the values of n integers with a scale. */
static void decode(const int8_t *q, int n, float scale, const Format *f, float *x) {
    int rotated = rotated_of(n, f);
    if (rotated) {
        for (int i = 0; i < rotated; i++)
            x[i] = (float)q[i];
        transform(x, x, rotated, f->run, scale * f->factor);
    }
    for (int i = rotated; i < n; i++)
        x[i] = (float)q[i] * scale;
}

static inline float scale_at(const void *scales, int dtype, int64_t index) {
    return dtype == FP32 ? ((const float *)scales)[index]
                        : from_bf16(((const uint16_t *)scales)[index]);
}

static inline void put_scale(void *scales, int dtype, int64_t index, float scale) {
    if (dtype == FP32)
        ((float *)scales)[index] = scale;
    else
        ((uint16_t *)scales)[index] = (uint16_t)((uint32_t)bits_of(scale) >> 16);
}

/* Read the residual of a block. */
static void load_residual(const Residual *r, int64_t first, int64_t index, int n, float *e) {
    const int8_t *q = (const int8_t *)r->values + first;
    const uint16_t *x = (const uint16_t *)r->values + first;
    if (r->scales) {
        float scale = scale_at(r->scales, r->scale_dtype, index);
        for (int i = 0; i < n; i++)
            e[i] = (float)q[i] * scale;
    } else {
        for (int i = 0; i < n; i++)
            e[i] = from_bf16(x[i]);
    }
}

/* Overwrite the residual e of a block, given the values x that were quantised and the decoded ones,
 * which are overwritten. */
static void store_residual(const Residual *r, int64_t first, int64_t index, int n, const float *e,
                           const float *x, float *decoded) {
    for (int i = 0; i < n; i++) {
        float lost = x[i] - decoded[i];
        lost = r->has_decay ? r->old_weight * e[i] + r->new_weight * lost : lost;
        decoded[i] = isfinite(lost) ? lost : 0.0f;
    }
    int8_t *q = (int8_t *)r->values + first;
    uint16_t *target = (uint16_t *)r->values + first;
    if (r->scales) {
        float scale = scale_of(largest_magnitude(decoded, n), 127.0f, r->scale_dtype);
        put_scale(r->scales, r->scale_dtype, index, scale);
        round_nearest(decoded, n, scale > 0.0f ? 1.0f / scale : 0.0f, q);
    } else {
        for (int i = 0; i < n; i++)
            target[i] = to_bf16(decoded[i]);
    }
}

/* The functions below are called by native_blockwise.py; blockwise.py documents their arguments.
 * dtypes are FP32 or BF16. */
void frontier_quantise(const void *values, int dtype, int64_t n, const void *base, int base_dtype,
                       const Format *f, uint32_t seed, const Residual *residual, void *scales,
                       uint8_t *packed) {
    float copy[MAX_BLOCK_ELEMENTS], rotated[MAX_BLOCK_ELEMENTS], old[MAX_BLOCK_ELEMENTS];
    int8_t q[MAX_BLOCK_ELEMENTS];
    int32_t limit = f->bits == 8 ? 127 : 7;
    for (int64_t first = 0, index = 0; first < n; first += f->block, index++) {
        int count = (int)(n - first < f->block ? n - first : f->block);
        int computes = base || residual;
        const float *x = load(values, dtype, base, base_dtype, computes, first, count, copy);
        if (residual) {
            load_residual(residual, first, index, count, old);
            for (int i = 0; i < count; i++)
                copy[i] += old[i];
        }
        const float *y = x;
        if (f->run) {
            rotate(x, rotated, count, f);
            y = rotated;
        }
        float scale = scale_of(largest_magnitude(y, count), (float)limit, f->scale_dtype);
        int usable = scale > 0.0f && isfinite(scale);
        int8_t *integers = f->bits == 8 ? (int8_t *)packed : q;
        if (!usable)
            memset(integers, 0, (size_t)count);
        else if (f->stochastic)
            round_stochastic(y, count, 1.0f / scale, limit, (uint32_t)first, seed, integers);
        else
            round_nearest(y, count, 1.0f / scale, integers);
        if (f->bits == 4)
            pack_4(q, count, (int)f->block / 2, packed);
        if (residual) {
            decode(integers, count, scale, f, rotated);
            store_residual(residual, first, index, count, old, x, rotated);
        }
        put_scale(scales, f->scale_dtype, index, scale);
        packed += f->block * f->bits / 8;
    }
}

/* Return a block's integers: in place if they have 8 bits, else unpacked in the last argument. */
static const int8_t *integers_of(const uint8_t *packed, int n, const Format *f,
                                 int8_t *unpacked) {
    if (f->bits == 8)
        return (const int8_t *)packed;
    unpack_4(packed, n, (int)f->block / 2, unpacked);
    return unpacked;
}

/* Write or add decoded values to a block of a buffer. */
static void store(const float *x, int n, int add, void *out, int dtype, int64_t first) {
    float *wide = (float *)out + first;
    uint16_t *narrow = (uint16_t *)out + first;
    if (dtype == FP32)
        for (int i = 0; i < n; i++)
            wide[i] = add ? wide[i] + x[i] : x[i];
    else
        for (int i = 0; i < n; i++)
            narrow[i] = to_bf16(add ? from_bf16(narrow[i]) + x[i] : x[i]);
}

void frontier_dequantise(const void *scales, const uint8_t *packed, int64_t n, const Format *f,
                         void *out, int dtype, int add) {
    int8_t q[MAX_BLOCK_ELEMENTS];
    float x[MAX_BLOCK_ELEMENTS];
    for (int64_t first = 0, index = 0; first < n; first += f->block, index++) {
        int count = (int)(n - first < f->block ? n - first : f->block);
        float scale = scale_at(scales, f->scale_dtype, index);
        const int8_t *integers = integers_of(packed, count, f, q);
        if (dtype == FP32 && !add) {
            decode(integers, count, scale, f, (float *)out + first);
        } else {
            decode(integers, count, scale, f, x);
            store(x, count, add, out, dtype, first);
        }
        packed += f->block * f->bits / 8;
    }
}

/* Strides are in bytes. All ranks' values of a block are added while its sum is in the cache. */
void frontier_add_up(const uint8_t *scales, int64_t scales_stride, const uint8_t *packed,
                     int64_t packed_stride, int ranks, int skip, int64_t n, const Format *f,
                     float *total) {
    int8_t q[MAX_BLOCK_ELEMENTS];
    float sums[MAX_BLOCK_ELEMENTS];
    for (int64_t first = 0, index = 0; first < n; first += f->block, index++) {
        int count = (int)(n - first < f->block ? n - first : f->block);
        float *target = f->run ? sums : total + first;
        if (f->run)
            memset(sums, 0, (size_t)count * sizeof *sums);
        for (int rank = 0; rank < ranks; rank++) {
            if (rank == skip)
                continue;
            float scale = scale_at(scales + rank * scales_stride, f->scale_dtype, index);
            const int8_t *integers = integers_of(packed + rank * packed_stride, count, f, q);
            for (int i = 0; i < count; i++)
                target[i] += (float)integers[i] * scale;
        }
        if (f->run) {
            rotate(sums, sums, count, f);
            for (int i = 0; i < count; i++)
                total[first + i] += sums[i];
        }
        packed += f->block * f->bits / 8;
    }
}
