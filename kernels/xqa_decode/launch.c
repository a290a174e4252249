/* XQA decode: from kseal_xqa_decode_args to the launch of upstream's kernel_mha, that of mha.cu or that of mha_sm90.cu. */
#include <math.h>

#include "kernseal_ops.h"

#define OP "xqa_decode"
#include "list.h"
#include "xqa_decode/pages.h"

#define LIMIT(name) KSEAL_XQA_DECODE_LIMIT_##name
#define FILL_DEVICE (-1) /* kv_splits */

/* mha.cu */
#define DRAFT_ROWS 32       /* query rows of one thread block where a sequence has several tokens */
#define GRAIN_ROWS 32       /* query rows whose maxima, or sums, fill ROW_STATE_BYTES */
#define ROW_STATE_BYTES 128
#define SLICE_ELEMS 64      /* elements of a head in one slice of partial output */

/* mha_sm90.cu */
#define BOX_ELEMS 128 /* most elements of a head in one copy */
#define SUM_MAX_BYTES 8
#define OUT_BYTES 2   /* of an element of partial output */

#define FP4_PER_BYTE 2
#define FP4_PER_SCALE 16
#define MASK_BITS 32

typedef kseal_xqa_decode_args args_t;

/* Distances in heads, as the kernel multiplies them. */
struct strides {
    uint32_t page, token, head;
};

/* The run with its defaults filled in. */
struct problem {
    const args_t *args;
    int64_t head_dim, group_size, page_size, tile_tokens;
    bool window, drafts, scaled_kv, fp4_kv, small_out, gmma;
    int64_t capacity;   /* positions that a row of the page table can hold */
    int64_t q_len;
    int64_t row_blocks; /* thread blocks over the query rows of one sequence and KV head */
    struct strides kv, scales;
    uint32_t splits, min_tiles; /* most blocks of a sequence, and fewest tiles of each */
    uint64_t semaphores_bytes, workspace_bytes;
};

/* ---- validation: one function per kind of rule, each naming field, value and what is supported ---- */

static bool has_16_bits(uint32_t dtype) { return dtype == KSEAL_DTYPE_BF16 || dtype == KSEAL_DTYPE_F16; }

static struct problem problem_of(const struct kseal_handle *handle, const args_t *a) {
    const uint32_t *axes = handle->variant->axes;
    const struct kseal_xqa_decode_class *class = &kseal_xqa_decode_classes[handle->variant->class_index];
    return (struct problem){
        .args = a,
        .head_dim = axes[KSEAL_XQA_DECODE_AXIS_HEAD_DIM],
        .group_size = axes[KSEAL_XQA_DECODE_AXIS_GROUP_SIZE],
        .page_size = axes[KSEAL_XQA_DECODE_AXIS_PAGE_SIZE],
        .tile_tokens = class->tile_tokens,
        .window = axes[KSEAL_XQA_DECODE_AXIS_SLIDING_WINDOW] != 0,
        .drafts = axes[KSEAL_XQA_DECODE_AXIS_SPEC_DECODE] != 0,
        .scaled_kv = !has_16_bits(axes[KSEAL_XQA_DECODE_AXIS_KV_DTYPE]),
        .fp4_kv = axes[KSEAL_XQA_DECODE_AXIS_KV_DTYPE] == KSEAL_DTYPE_NVFP4,
        .small_out = !has_16_bits(axes[KSEAL_XQA_DECODE_AXIS_OUT_DTYPE]),
        .gmma = class->builder == KSEAL_XQA_DECODE_BUILDER_GMMA,
    };
}

static kseal_status check_heads(const args_t *a, const struct problem *p) {
    CHECK(kseal_check_positive(OP, "num_kv_heads", a->num_kv_heads));
    if (a->num_kv_heads > LIMIT(MAX_GRID))
        REFUSE(KSEAL_OVERFLOW, "num_kv_heads is %d; up to %d are supported", a->num_kv_heads, LIMIT(MAX_GRID));
    if (a->num_q_heads != p->group_size * a->num_kv_heads)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_q_heads is %d; it must be %lld, config.group_size (%lld) * num_kv_heads (%d)",
               a->num_q_heads, (long long)(p->group_size * a->num_kv_heads), (long long)p->group_size, a->num_kv_heads);
    return KSEAL_OK;
}

/* q_len and q_rows; sets what follows from them. */
static kseal_status check_rows(const args_t *a, struct problem *p) {
    if (p->drafts ? a->q_len <= 0 : (a->q_len != 0 && a->q_len != 1))
        REFUSE(KSEAL_INVALID_ARGUMENT, "q_len is %d; it must be %s", a->q_len,
               p->drafts ? "positive" : "0 or 1, since config.spec_decode is 0");
    p->q_len = p->drafts ? a->q_len : 1;
    p->row_blocks = p->drafts ? div_up(p->q_len * p->group_size, DRAFT_ROWS) : 1;
    if (!product_below(LIMIT(MAX_GRID) + 1, p->row_blocks, a->num_kv_heads, 1))
        REFUSE(KSEAL_OVERFLOW, "q_len is %d; %d * ceil(q_len * group_size / %d) must be at most %d (num_kv_heads is %d)", a->q_len,
               a->num_kv_heads, DRAFT_ROWS, LIMIT(MAX_GRID), a->num_kv_heads);
    if (!product_below(INDEX_END, a->batch_size, p->q_len, a->num_q_heads))
        REFUSE(KSEAL_OVERFLOW, "batch_size is %lld; B * q_len * Hq must be below 2^32 (q_len is %lld, Hq is %d)",
               (long long)a->batch_size, (long long)p->q_len, a->num_q_heads);
    if (p->drafts && !product_below(INDEX_END, a->batch_size, p->q_len, div_up(p->q_len, MASK_BITS)))
        REFUSE(KSEAL_OVERFLOW, "q_len is %d; B * q_len * ceil(q_len / 32) must be below 2^32 (B is %lld)", a->q_len,
               (long long)a->batch_size);
    int64_t most = a->batch_size * p->q_len;
    if (a->q_rows < 0 || a->q_rows > most)
        REFUSE(KSEAL_INVALID_ARGUMENT, "q_rows is %lld; it must be at most B * q_len, %lld here, or 0 for that",
               (long long)a->q_rows, (long long)most);
    if (a->q_cu_lens == NULL && a->q_rows != 0 && a->q_rows != most)
        REFUSE(KSEAL_INVALID_ARGUMENT, "q_rows is %lld; without q_cu_lens it must be B * q_len, %lld here, or 0 for that",
               (long long)a->q_rows, (long long)most);
    return KSEAL_OK;
}

static kseal_status check_sizes(const args_t *a, struct problem *p) {
    if (a->batch_size > LIMIT(MAX_GRID))
        REFUSE(KSEAL_OVERFLOW, "batch_size is %lld; up to %d are supported", (long long)a->batch_size, LIMIT(MAX_GRID));
    if (p->gmma && !product_below(LIMIT(MAX_GRID) + 1, a->batch_size, a->num_kv_heads, 1))
        REFUSE(KSEAL_OVERFLOW, "batch_size is %lld; with config.fp8_math, B * Hkv must be at most %d (Hkv is %d)",
               (long long)a->batch_size, LIMIT(MAX_GRID), a->num_kv_heads);
    CHECK(check_rows(a, p));
    CHECK(check_pages(a->batch_size, a->num_pages, a->max_pages_per_seq, p->page_size));
    p->capacity = a->max_pages_per_seq * p->page_size;
    if (a->max_seq_len < 0 || a->max_seq_len > p->capacity)
        REFUSE(KSEAL_INVALID_ARGUMENT,
               "max_seq_len is %lld; it must be at most max_pages_per_seq * page_size, %lld here, or 0 for that",
               (long long)a->max_seq_len, (long long)p->capacity);
    return KSEAL_OK;
}

/* A scale that goes with small elements; those of 16 bits have none, and 0 or 1 says so. */
static kseal_status check_small_scale(const char *name, float scale, bool small, const char *of) {
    if (small)
        return kseal_check_scale(OP, name, scale);
    if (scale != 0.0f && scale != 1.0f)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %g; it must be 0 or 1, since config.%s has 16 bits", name, (double)scale, of);
    return KSEAL_OK;
}

static kseal_status check_numbers(const args_t *a, const struct problem *p) {
    if (a->kv_splits < FILL_DEVICE || a->kv_splits > LIMIT(MAX_KV_SPLITS))
        REFUSE(KSEAL_INVALID_ARGUMENT,
               "kv_splits is %d; 1 to %d are supported, 0 for the library's choice, or -1 to fill the device", a->kv_splits,
               LIMIT(MAX_KV_SPLITS));
    if (p->window ? a->window <= 0 : a->window != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "window is %d; it must be %s", a->window,
               p->window ? "positive, since config.sliding_window is 1" : "0, since config.sliding_window is 0");
    CHECK(kseal_check_flag(OP, "pdl", a->pdl));
    if (a->q_scale_ptr == NULL)
        CHECK(kseal_check_scale(OP, "q_scale", a->q_scale));
    if (a->kv_scale_ptr == NULL)
        CHECK(check_small_scale("kv_scale", a->kv_scale, p->scaled_kv, "kv_dtype"));
    return check_small_scale("rcp_out_scale", a->rcp_out_scale, p->small_out, "out_dtype");
}

struct stride {
    const char *name;
    int64_t given, dense; /* in elements; 0 given stands for dense */
    int64_t count;        /* what it steps over */
    int64_t head;         /* elements of one head */
    uint32_t *heads;      /* where the stride goes, in heads */
};

/* The kernel multiplies a stride with an index below `count` as uint32, so a larger product would silently wrap. */
static kseal_status check_stride(const struct stride *s) {
    int64_t stride = s->given != 0 ? s->given : s->dense;
    if (stride < 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %lld; it must be positive, or 0 for %lld", s->name, (long long)s->given,
               (long long)s->dense);
    if (stride % s->head != 0)
        REFUSE(KSEAL_MISALIGNED, "%s is %lld; it must be a multiple of %lld, one head", s->name, (long long)s->given,
               (long long)s->head);
    if (stride / s->head >= INDEX_END || !product_below(INDEX_END, stride / s->head, s->count - 1, 1))
        REFUSE(KSEAL_OVERFLOW, "%s is %lld; the last of %lld must begin below 2^32 heads of %lld elements", s->name,
               (long long)stride, (long long)s->count, (long long)s->head);
    *s->heads = (uint32_t)(stride / s->head);
    return KSEAL_OK;
}

static kseal_status check_strides(const args_t *a, struct problem *p) {
    int64_t head = p->fp4_kv ? p->head_dim / FP4_PER_BYTE : p->head_dim, scales = p->head_dim / FP4_PER_SCALE;
    int64_t heads = a->num_kv_heads, tokens = p->page_size, pages = a->num_pages;
    const struct stride strides[] = {
        {"kv_page_stride", a->kv_page_stride, tokens * heads * head, pages, head, &p->kv.page},
        {"kv_token_stride", a->kv_token_stride, heads * head, tokens, head, &p->kv.token},
        {"kv_head_stride", a->kv_head_stride, head, heads, head, &p->kv.head},
        {"scale_page_stride", a->scale_page_stride, tokens * heads * scales, pages, scales, &p->scales.page},
        {"scale_token_stride", a->scale_token_stride, heads * scales, tokens, scales, &p->scales.token},
        {"scale_head_stride", a->scale_head_stride, scales, heads, scales, &p->scales.head},
    };
    size_t count = sizeof strides / sizeof *strides;
    for (size_t i = 0; i < count; i++) {
        bool of_scales = i >= count / 2;
        if (of_scales && !p->fp4_kv)
            CHECK(kseal_check_zero(OP, strides[i].name, strides[i].given, "config.kv_dtype is not nvfp4"));
        else
            CHECK(check_stride(&strides[i]));
    }
    return KSEAL_OK;
}

static kseal_status check_pointers(const args_t *a, const struct problem *p) {
    const char *no_drafts = p->drafts ? NULL : "config.spec_decode is 0";
    const char *no_fp4 = p->fp4_kv ? NULL : "config.kv_dtype is not nvfp4";
    enum kseal_presence scratch = p->splits > 1 ? KSEAL_NEEDED : KSEAL_OPTIONAL;
    enum kseal_presence if_fp4 = p->fp4_kv ? KSEAL_NEEDED : KSEAL_UNWANTED;
    const struct kseal_pointer pointers[] = {
        {"q", a->q, LIMIT(ALIGN_Q), KSEAL_NEEDED, NULL},
        {"k", a->k, LIMIT(ALIGN_K), KSEAL_NEEDED, NULL},
        {"v", a->v, LIMIT(ALIGN_V), KSEAL_NEEDED, NULL},
        {"k_scales", a->k_scales, LIMIT(ALIGN_K_SCALES), if_fp4, no_fp4},
        {"v_scales", a->v_scales, LIMIT(ALIGN_V_SCALES), if_fp4, no_fp4},
        {"o", a->o, LIMIT(ALIGN_O), KSEAL_NEEDED, NULL},
        {"page_table", a->page_table, LIMIT(ALIGN_PAGE_TABLE), KSEAL_NEEDED, NULL},
        {"seq_lens", a->seq_lens, LIMIT(ALIGN_SEQ_LENS), KSEAL_NEEDED, NULL},
        {"q_cu_lens", a->q_cu_lens, LIMIT(ALIGN_Q_CU_LENS), p->drafts ? KSEAL_OPTIONAL : KSEAL_UNWANTED, no_drafts},
        {"mask", a->mask, LIMIT(ALIGN_MASK), p->drafts ? KSEAL_NEEDED : KSEAL_UNWANTED, no_drafts},
        {"sinks", a->sinks, LIMIT(ALIGN_SINKS), KSEAL_OPTIONAL, NULL},
        {"q_scale_ptr", a->q_scale_ptr, LIMIT(ALIGN_Q_SCALE_PTR), KSEAL_OPTIONAL, NULL},
        {"kv_scale_ptr", a->kv_scale_ptr, LIMIT(ALIGN_KV_SCALE_PTR), p->scaled_kv ? KSEAL_OPTIONAL : KSEAL_UNWANTED,
         "config.kv_dtype has 16 bits"},
        {"semaphores", a->semaphores, LIMIT(ALIGN_SEMAPHORES), scratch, NULL},
        {"workspace", a->workspace, LIMIT(ALIGN_WORKSPACE), scratch, NULL},
    };
    return kseal_check_pointers(OP, pointers, sizeof pointers / sizeof *pointers);
}

/* ---- how the work is split ---- */

/* Blocks for one sequence and KV head that fill the device, `sequences` of which run at once; as upstream's launchers. */
static int64_t fill(const struct kseal_handle *handle, const struct problem *p, int64_t sequences) {
    int64_t sms = handle->sm_count;
    return at_least(1, p->gmma ? (3 * sms / sequences + 2) / 4 : sms / sequences);
}

/*
 * The library's choice looks at no batch: the kernel gives a sequence a block for every `min_tiles` of its own tiles, up to the
 * grid's. Cutting the grid to what the longest sequence needs changes no bit then.
 */
static void split(const struct kseal_handle *handle, const args_t *a, struct problem *p) {
    p->min_tiles = a->kv_splits == 0 ? (uint32_t)(LIMIT(SHARE_TOKENS) / p->tile_tokens) : 1;
    p->splits = (uint32_t)a->kv_splits;
    if (a->kv_splits > 0)
        return;
    int64_t longest = a->max_seq_len != 0 ? a->max_seq_len : p->capacity;
    int64_t sequences = a->kv_splits == FILL_DEVICE ? a->batch_size * a->num_kv_heads : a->num_kv_heads;
    int64_t most = at_least(1, div_up(longest, p->tile_tokens) / p->min_tiles);
    p->splits = (uint32_t)at_most(at_most(fill(handle, p, sequences), most), LIMIT(MAX_KV_SPLITS));
}

/* Elements of a head as the kernel keeps it in shared memory and scratch. */
static int64_t padded(int64_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : head_dim <= 256 ? 256 : 512; }

/* As the kernel lays scratch out: the state of the softmax, then partial outputs, each aligned to its own size. */
static int64_t scratch_of(const struct problem *p, int64_t blocks) {
    if (p->gmma) {
        int64_t partial = p->group_size * p->head_dim * OUT_BYTES;
        return round_up(blocks * p->group_size * SUM_MAX_BYTES, partial) + blocks * partial;
    }
    int64_t rows = p->drafts ? DRAFT_ROWS : p->group_size;
    int64_t state = div_up(rows, GRAIN_ROWS) * ROW_STATE_BYTES;
    int64_t partial = rows * ROW_STATE_BYTES * (padded(p->head_dim) / SLICE_ELEMS);
    return round_up(2 * blocks * state, partial) + blocks * partial;
}

static kseal_status measure(const args_t *a, struct problem *p) {
    if (p->splits == 1)
        return KSEAL_OK;
    int64_t sequences = a->batch_size * a->num_kv_heads * p->row_blocks;
    int64_t bytes = scratch_of(p, p->splits * sequences);
    if (bytes >= INDEX_END)
        REFUSE(KSEAL_OVERFLOW, "kv_splits is %d; scratch of %u blocks a sequence, %lld bytes, must be below 2^32 (B is %lld)",
               a->kv_splits, p->splits, (long long)bytes, (long long)a->batch_size);
    p->semaphores_bytes = (uint64_t)sequences * sizeof(uint32_t);
    p->workspace_bytes = (uint64_t)bytes;
    return KSEAL_OK;
}

static kseal_status plan(const struct kseal_handle *handle, const args_t *a, struct problem *p) {
    CHECK(check_heads(a, p));
    CHECK(check_sizes(a, p));
    CHECK(check_numbers(a, p));
    CHECK(check_strides(a, p));
    split(handle, a, p);
    return measure(a, p);
}

/* Fills `p` unless the batch is empty. */
static kseal_status plan_batch(const struct kseal_handle *handle, const args_t *a, struct problem *p) {
    *p = problem_of(handle, a);
    CHECK(kseal_check_not_negative(OP, "batch_size", a->batch_size));
    return a->batch_size == 0 ? KSEAL_OK : plan(handle, a, p);
}

kseal_status kseal_xqa_decode_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p;
    CHECK(plan_batch(handle, args, &p));
    *bytes = p.workspace_bytes;
    return KSEAL_OK;
}

kseal_status kseal_xqa_decode_launch_semaphores(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p;
    CHECK(plan_batch(handle, args, &p));
    *bytes = p.semaphores_bytes;
    return KSEAL_OK;
}

/* ---- the launch ---- */

/* KVCacheList<true> with scales: passed by value. */
struct fp4_cache_list {
    const void *k, *v;
    const void *k_scales, *v_scales;
    const void *page_table;
    const void *seq_lens;
    uint32_t max_pages_per_seq;
};

static void add_strides(struct list *list, struct strides *strides) {
    add(list, &strides->page);
    add(list, &strides->token);
    add(list, &strides->head);
}

/* A part of a head of the cache, as far as a tile or a page reaches. Pages that do not exist read as zeros. */
static kseal_status encode_cache(const struct problem *p, const void *cache, struct kseal_tensor_map *map) {
    const args_t *a = p->args;
    uint64_t head = (uint64_t)p->head_dim;
    uint32_t part = (uint32_t)at_most(padded(p->head_dim), BOX_ELEMS);
    const struct kseal_tiles tiles = {
        .type = CU_TENSOR_MAP_DATA_TYPE_UINT8,
        .rank = 4,
        .address = cache,
        .sizes = {head, (uint64_t)a->num_kv_heads, (uint64_t)p->page_size, (uint64_t)a->num_pages},
        .strides = {p->kv.head * head, p->kv.token * head, p->kv.page * head},
        .box = {part, 1, (uint32_t)at_most(p->page_size, p->tile_tokens), 1},
        .swizzle = part == BOX_ELEMS ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
    };
    return kseal_encode_tiles(&tiles, map);
}

static struct kseal_launch launch_of(const struct problem *p) {
    uint32_t kv_heads = (uint32_t)p->args->num_kv_heads, batch = (uint32_t)p->args->batch_size;
    bool pdl = p->args->pdl != 0;
    CUstream stream = p->args->stream;
    if (p->gmma)
        return (struct kseal_launch){
            .grid = {1, p->splits, kv_heads * batch}, .block = {128, 1, 3}, .pdl = pdl, .stream = stream};
    uint32_t row_blocks = (uint32_t)p->row_blocks;
    return (struct kseal_launch){
        .grid = {p->splits, kv_heads * row_blocks, batch}, .block = {128, 1, 2}, .pdl = pdl, .stream = stream};
}

/* mha_sm90.cu copies the cache by TMA, and has no drafts and no FP4; mha.cu reads it by its strides. */
static kseal_status launch(const struct kseal_handle *handle, const struct problem *p) {
    args_t a = *p->args;
    uint32_t kv_heads = (uint32_t)a.num_kv_heads, window = (uint32_t)a.window, batch = (uint32_t)a.batch_size;
    uint32_t q_len = (uint32_t)p->q_len, group = (uint32_t)p->group_size, pages = (uint32_t)a.max_pages_per_seq;
    uint32_t min_tiles = p->min_tiles;
    struct strides kv = p->kv, scales = p->scales;
    struct cache_list cache = {a.k, a.v, a.page_table, a.seq_lens, pages};
    struct fp4_cache_list fp4_cache = {a.k, a.v, a.k_scales, a.v_scales, a.page_table, a.seq_lens, pages};
    struct kseal_tensor_map k, v;
    struct list list = {.count = 0};
    if (p->gmma) {
        CHECK(encode_cache(p, a.k, &k));
        CHECK(encode_cache(p, a.v, &v));
    }
    add_if(&list, p->drafts, &q_len);
    add(&list, &kv_heads);
    add_if(&list, p->drafts, &group);
    add_if(&list, p->drafts, &a.q_cu_lens);
    add_if(&list, p->window, &window);
    add(&list, &a.q_scale);
    add(&list, &a.q_scale_ptr);
    add(&list, &a.o);
    add_if(&list, p->small_out, &a.rcp_out_scale);
    add(&list, &a.q);
    add_if(&list, p->drafts, &a.mask);
    add(&list, &a.sinks);
    add(&list, p->fp4_kv ? (void *)&fp4_cache : (void *)&cache);
    add(&list, &batch);
    add(&list, &a.kv_scale);
    add(&list, &a.kv_scale_ptr);
    add_if(&list, p->gmma, &k);
    add_if(&list, p->gmma, &v);
    if (!p->gmma)
        add_strides(&list, &kv);
    if (p->fp4_kv)
        add_strides(&list, &scales);
    add(&list, &a.semaphores);
    add(&list, &a.workspace);
    add(&list, &min_tiles);
    const struct kseal_launch launch = launch_of(p);
    return kseal_handle_launch_kernel(handle, &launch, list.args);
}

kseal_status kseal_xqa_decode_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p;
    CHECK(plan_batch(handle, args, &p));
    if (args->batch_size == 0)
        return KSEAL_OK;
    CHECK(check_pointers(args, &p));
    CHECK(kseal_check_room(OP, "semaphores_bytes", args->semaphores_bytes, p.semaphores_bytes));
    CHECK(kseal_check_room(OP, "workspace_bytes", args->workspace_bytes, p.workspace_bytes));
    CHECK(kseal_handle_check_device(handle));
    return launch(handle, &p);
}
