/* XQA MLA decode: from kseal_xqa_mla_args to the launch of upstream's kernel_mha for multi-head latent attention. */
#include <math.h>

#include "kernseal_ops.h"

#define OP "xqa_mla"
#include "xqa_decode/pages.h"

#define LIMIT(name) KSEAL_XQA_MLA_LIMIT_##name
#define STRIDE_END ((int64_t)1 << 40)  /* bytes: what a TMA descriptor can hold */
#define ADDRESS_END ((int64_t)1 << 57) /* bytes that an address can reach */
#define SMALLEST_SCALE 0x1p-96f        /* the kernel masks a logit with the lowest float times the scale */
#define CLUSTER 4                      /* thread blocks that share a sequence */
#define THREADS 384
#define PART_ELEMS 64 /* elements of a row of Q or K in one box */

typedef kseal_xqa_mla_args args_t;

/* The run with its defaults filled in. */
struct problem {
    const args_t *args;
    bool small; /* 8-bit elements */
    int64_t elem_bytes, page_size;
    int64_t page_stride, token_stride; /* in bytes */
    uint64_t workspace_bytes;
};

/* ---- validation: one function per kind of rule, each naming field, value and what is supported ---- */

static struct problem problem_of(const struct kseal_handle *handle, const args_t *a) {
    const uint32_t *axes = handle->variant->axes;
    bool small = axes[KSEAL_XQA_MLA_AXIS_DTYPE] == KSEAL_DTYPE_E4M3;
    return (struct problem){
        .args = a,
        .small = small,
        .elem_bytes = small ? 1 : 2,
        .page_size = axes[KSEAL_XQA_MLA_AXIS_PAGE_SIZE],
    };
}

static kseal_status check_sizes(const args_t *a, const struct problem *p) {
    if (a->num_q_heads != LIMIT(NUM_Q_HEADS))
        REFUSE(KSEAL_UNSUPPORTED, "num_q_heads is %d; %d are supported", a->num_q_heads, LIMIT(NUM_Q_HEADS));
    if (a->batch_size > LIMIT(MAX_GRID))
        REFUSE(KSEAL_OVERFLOW, "batch_size is %lld; up to %d are supported", (long long)a->batch_size, LIMIT(MAX_GRID));
    return check_pages(a->batch_size, a->num_pages, a->max_pages_per_seq, p->page_size);
}

static kseal_status check_numbers(const args_t *a) {
    CHECK(kseal_check_flag(OP, "pdl", a->pdl));
    if (a->q_scale_ptr == NULL)
        CHECK(kseal_check_positive_scale(OP, "q_scale", a->q_scale));
    if (a->kv_scale_ptr == NULL)
        CHECK(kseal_check_positive_scale(OP, "kv_scale", a->kv_scale));
    if (a->q_scale_ptr != NULL || a->kv_scale_ptr != NULL)
        return KSEAL_OK;
    float scale = a->q_scale * a->kv_scale;
    if (!isfinite(scale) || scale < SMALLEST_SCALE)
        REFUSE(KSEAL_INVALID_ARGUMENT, "q_scale is %g; q_scale * kv_scale must be finite and at least 2^-96 (kv_scale is %g)",
               (double)a->q_scale, (double)a->kv_scale);
    return KSEAL_OK;
}

/* Writes the stride to use in bytes: `given` elements, or `dense` where that is 0. `count` of them lie one after the other. */
static kseal_status check_stride(const char *name, int64_t given, int64_t dense, int64_t count, const struct problem *p,
                                 int64_t *bytes) {
    int64_t stride = given != 0 ? given : dense, align = LIMIT(STRIDE_ALIGN) / p->elem_bytes;
    if (stride < LIMIT(HEAD_DIM))
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %lld; it must be at least %d, or 0 for %lld", name, (long long)given,
               LIMIT(HEAD_DIM), (long long)dense);
    if (stride % align != 0)
        REFUSE(KSEAL_MISALIGNED, "%s is %lld; it must be a multiple of %lld elements, %d bytes", name, (long long)given,
               (long long)align, LIMIT(STRIDE_ALIGN));
    if (!product_below(STRIDE_END, stride, p->elem_bytes, 1))
        REFUSE(KSEAL_OVERFLOW, "%s is %lld; it must be below 2^40 bytes", name, (long long)stride);
    *bytes = stride * p->elem_bytes;
    if (!product_below(ADDRESS_END, *bytes, count - 1, 1))
        REFUSE(KSEAL_OVERFLOW, "%s is %lld; the last of %lld must begin below 2^57 bytes", name, (long long)stride,
               (long long)count);
    return KSEAL_OK;
}

static kseal_status check_strides(const args_t *a, struct problem *p) {
    int64_t row = LIMIT(HEAD_DIM);
    CHECK(check_stride("kv_page_stride", a->kv_page_stride, p->page_size * row, a->num_pages, p, &p->page_stride));
    return check_stride("kv_token_stride", a->kv_token_stride, row, p->page_size, p, &p->token_stride);
}

static kseal_status check_pointers(const args_t *a) {
    const struct kseal_pointer pointers[] = {
        {"q", a->q, LIMIT(ALIGN_Q), KSEAL_NEEDED, NULL},
        {"k", a->k, LIMIT(ALIGN_K), KSEAL_NEEDED, NULL},
        {"v", a->v, LIMIT(ALIGN_V), KSEAL_NEEDED, NULL},
        {"o", a->o, LIMIT(ALIGN_O), KSEAL_NEEDED, NULL},
        {"page_table", a->page_table, LIMIT(ALIGN_PAGE_TABLE), KSEAL_NEEDED, NULL},
        {"seq_lens", a->seq_lens, LIMIT(ALIGN_SEQ_LENS), KSEAL_NEEDED, NULL},
        {"q_scale_ptr", a->q_scale_ptr, LIMIT(ALIGN_Q_SCALE_PTR), KSEAL_OPTIONAL, NULL},
        {"kv_scale_ptr", a->kv_scale_ptr, LIMIT(ALIGN_KV_SCALE_PTR), KSEAL_OPTIONAL, NULL},
        {"workspace", a->workspace, LIMIT(ALIGN_WORKSPACE), KSEAL_NEEDED, NULL},
    };
    return kseal_check_pointers(OP, pointers, sizeof pointers / sizeof *pointers);
}

static kseal_status check_scratch(const args_t *a, const struct problem *p) {
    if (a->workspace_bytes < p->workspace_bytes)
        REFUSE(KSEAL_WORKSPACE_TOO_SMALL, "workspace_bytes is %llu; %llu are needed, %d * B", (unsigned long long)a->workspace_bytes,
               (unsigned long long)p->workspace_bytes, LIMIT(WORKSPACE_PER_SEQ));
    return KSEAL_OK;
}

/* An empty batch needs nothing. */
static kseal_status plan(const args_t *a, struct problem *p) {
    CHECK(kseal_check_not_negative(OP, "batch_size", a->batch_size));
    if (a->batch_size == 0)
        return KSEAL_OK;
    CHECK(check_sizes(a, p));
    CHECK(check_numbers(a));
    CHECK(check_strides(a, p));
    p->workspace_bytes = (uint64_t)a->batch_size * LIMIT(WORKSPACE_PER_SEQ);
    return KSEAL_OK;
}

kseal_status kseal_xqa_mla_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p = problem_of(handle, args);
    CHECK(plan(args, &p));
    *bytes = p.workspace_bytes;
    return KSEAL_OK;
}

/* ---- the TMA descriptors ---- */

static int type_of(const struct problem *p) {
    return p->small ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

/* The swizzle that a row of a box is read back with: of its own width. */
static int swizzle_of(const struct problem *p, uint32_t elems) {
    return (int64_t)elems * p->elem_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
}

/* Q as rows of one head each; a box is a part of all heads of a sequence. */
static kseal_status encode_q(const struct problem *p, struct kseal_tensor_map *map) {
    const struct kseal_tiles tiles = {
        .type = type_of(p),
        .rank = 2,
        .address = p->args->q,
        .sizes = {LIMIT(HEAD_DIM), (uint64_t)p->args->batch_size * LIMIT(NUM_Q_HEADS)},
        .strides = {(uint64_t)(LIMIT(HEAD_DIM) * p->elem_bytes)},
        .box = {PART_ELEMS, LIMIT(NUM_Q_HEADS)},
        .swizzle = swizzle_of(p, PART_ELEMS),
    };
    return kseal_encode_tiles(&tiles, map);
}

/*
 * K or V as [page, token, head, element]; a box is `elems` elements of a tile's tokens, or of a page's where a tile has more.
 * The one head has upstream's stride. A page at or past num_pages is outside, where TMA reads zeros.
 */
static kseal_status encode_cache(const struct problem *p, const void *pool, uint32_t elems, struct kseal_tensor_map *map) {
    int64_t tile_tokens = p->small ? 64 : 32;
    const struct kseal_tiles tiles = {
        .type = type_of(p),
        .rank = 4,
        .address = pool,
        .sizes = {LIMIT(HEAD_DIM), 1, (uint64_t)p->page_size, (uint64_t)p->args->num_pages},
        .strides = {(uint64_t)p->token_stride, (uint64_t)p->token_stride, (uint64_t)p->page_stride},
        .box = {elems, 1, (uint32_t)at_most(p->page_size, tile_tokens), 1},
        .swizzle = swizzle_of(p, elems),
    };
    return kseal_encode_tiles(&tiles, map);
}

struct maps {
    struct kseal_tensor_map q, k, v;
};

static kseal_status encode(const struct problem *p, struct maps *maps) {
    CHECK(encode_q(p, &maps->q));
    CHECK(encode_cache(p, p->args->k, PART_ELEMS, &maps->k));
    return encode_cache(p, p->args->v, p->small ? 128 : 64, &maps->v);
}

/* ---- the launch ---- */

static kseal_status launch(const struct kseal_handle *handle, const struct problem *p) {
    args_t a = *p->args;
    uint32_t batch = (uint32_t)a.batch_size;
    struct cache_list cache = {a.k, a.v, a.page_table, a.seq_lens, (uint32_t)a.max_pages_per_seq};
    struct maps maps;
    CHECK(encode(p, &maps));
    /* Semaphores and partial results are for a sequence that several clusters share: not here. */
    void *semaphores = NULL, *partial_results = NULL;
    void *params[] = {&maps.q, &maps.k,     &maps.v,         &a.q_scale,   &a.q_scale_ptr, &a.o,            &cache,
                      &batch,  &a.kv_scale, &a.kv_scale_ptr, &a.workspace, &semaphores,    &partial_results};
    const struct kseal_launch launch = {
        .grid = {CLUSTER, 1, batch},
        .block = {THREADS, 1, 1},
        .pdl = a.pdl != 0,
        .stream = a.stream,
    };
    return kseal_handle_launch_kernel(handle, &launch, params);
}

kseal_status kseal_xqa_mla_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p = problem_of(handle, args);
    CHECK(plan(args, &p));
    if (args->batch_size == 0)
        return KSEAL_OK;
    CHECK(check_pointers(args));
    CHECK(check_scratch(args, &p));
    CHECK(kseal_handle_check_device(handle));
    return launch(handle, &p);
}
