/* XQA decode: from kseal_xqa_decode_args to the launch of upstream's kernel_mha, that of mha.cu or that of mha_sm90.cu. */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#include "kernseal_ops.h"

#define LIMIT(name) KSEAL_XQA_DECODE_LIMIT_##name
#define INDEX_END ((int64_t)1 << 32)  /* the kernel multiplies and adds heads, rows and bytes of scratch as uint32 */
#define LENGTH_END ((int64_t)1 << 31) /* seq_lens may be int32 */
#define FILL_DEVICE (-1)              /* kv_splits */

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

#define REFUSE(status, ...) return kseal_fail(status, "xqa_decode: " __VA_ARGS__)

static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t div_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }
static int64_t round_up(int64_t value, int64_t unit) { return div_up(value, unit) * unit; }

/* Whether a * b, neither negative, is below `end`. */
static bool product_below(int64_t end, int64_t a, int64_t b) {
    int64_t product;
    return !__builtin_mul_overflow(a, b, &product) && product < end;
}

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
    if (a->num_kv_heads <= 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_kv_heads is %d; it must be positive", a->num_kv_heads);
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
    if (!product_below(LIMIT(MAX_GRID) + 1, p->row_blocks, a->num_kv_heads))
        REFUSE(KSEAL_OVERFLOW, "q_len is %d; %d * ceil(q_len * group_size / %d) must be at most %d (num_kv_heads is %d)", a->q_len,
               a->num_kv_heads, DRAFT_ROWS, LIMIT(MAX_GRID), a->num_kv_heads);
    if (!product_below(INDEX_END, a->batch_size * p->q_len, a->num_q_heads))
        REFUSE(KSEAL_OVERFLOW, "batch_size is %lld; B * q_len * Hq must be below 2^32 (q_len is %lld, Hq is %d)",
               (long long)a->batch_size, (long long)p->q_len, a->num_q_heads);
    if (p->drafts && !product_below(INDEX_END, a->batch_size * p->q_len, div_up(p->q_len, MASK_BITS)))
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
    if (p->gmma && !product_below(LIMIT(MAX_GRID) + 1, a->batch_size, a->num_kv_heads))
        REFUSE(KSEAL_OVERFLOW, "batch_size is %lld; with config.fp8_math, B * Hkv must be at most %d (Hkv is %d)",
               (long long)a->batch_size, LIMIT(MAX_GRID), a->num_kv_heads);
    kseal_status status = check_rows(a, p);
    if (status != KSEAL_OK)
        return status;
    if (a->num_pages <= 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_pages is %lld; it must be positive", (long long)a->num_pages);
    if (a->num_pages > LENGTH_END)
        REFUSE(KSEAL_OVERFLOW, "num_pages is %lld; the page table holds int32, so up to 2^31 are supported",
               (long long)a->num_pages);
    if (a->max_pages_per_seq <= 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "max_pages_per_seq is %lld; it must be positive", (long long)a->max_pages_per_seq);
    if (!product_below(LENGTH_END, a->max_pages_per_seq, p->page_size))
        REFUSE(KSEAL_OVERFLOW, "max_pages_per_seq is %lld; max_pages_per_seq * page_size must be below 2^31 (page_size is %lld)",
               (long long)a->max_pages_per_seq, (long long)p->page_size);
    if (!product_below(INDEX_END, a->batch_size, a->max_pages_per_seq))
        REFUSE(KSEAL_OVERFLOW, "max_pages_per_seq is %lld; B * max_pages_per_seq must be below 2^32 (B is %lld)",
               (long long)a->max_pages_per_seq, (long long)a->batch_size);
    p->capacity = a->max_pages_per_seq * p->page_size;
    if (a->max_seq_len < 0 || a->max_seq_len > p->capacity)
        REFUSE(KSEAL_INVALID_ARGUMENT,
               "max_seq_len is %lld; it must be at most max_pages_per_seq * page_size, %lld here, or 0 for that",
               (long long)a->max_seq_len, (long long)p->capacity);
    return KSEAL_OK;
}

static bool usable(float scale) { return isfinite(scale) && scale != 0.0f; }

/* A scale that goes with small elements; those of 16 bits have none, and 0 or 1 says so. */
static kseal_status check_small_scale(const char *name, float scale, bool small, const char *of) {
    if (small && !usable(scale))
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %g; it must be finite and not 0", name, (double)scale);
    if (!small && scale != 0.0f && scale != 1.0f)
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
    if (a->pdl > 1)
        REFUSE(KSEAL_INVALID_ARGUMENT, "pdl is %u; it must be 0 or 1", a->pdl);
    if (a->q_scale_ptr == NULL && !usable(a->q_scale))
        REFUSE(KSEAL_INVALID_ARGUMENT, "q_scale is %g; it must be finite and not 0", (double)a->q_scale);
    kseal_status status = KSEAL_OK;
    if (a->kv_scale_ptr == NULL)
        status = check_small_scale("kv_scale", a->kv_scale, p->scaled_kv, "kv_dtype");
    if (status == KSEAL_OK)
        status = check_small_scale("rcp_out_scale", a->rcp_out_scale, p->small_out, "out_dtype");
    return status;
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
    if (stride / s->head >= INDEX_END || !product_below(INDEX_END, stride / s->head, s->count - 1))
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
        if (of_scales && !p->fp4_kv && strides[i].given != 0)
            REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %lld; it must be 0, since config.kv_dtype is not nvfp4", strides[i].name,
                   (long long)strides[i].given);
        kseal_status status = of_scales && !p->fp4_kv ? KSEAL_OK : check_stride(&strides[i]);
        if (status != KSEAL_OK)
            return status;
    }
    return KSEAL_OK;
}

enum presence { NEEDED, OPTIONAL, UNWANTED };

struct pointer {
    const char *name;
    const void *value;
    uint32_t align;
    enum presence presence;
    const char *why; /* of UNWANTED */
};

static kseal_status check_pointer(const struct pointer *p) {
    if (p->value == NULL && p->presence == NEEDED)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is null; it is needed", p->name);
    if (p->value != NULL && p->presence == UNWANTED)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %p; it must be null, since %s", p->name, p->value, p->why);
    if ((uintptr_t)p->value % p->align != 0)
        REFUSE(KSEAL_MISALIGNED, "%s is %p; it must be aligned to %u bytes", p->name, p->value, p->align);
    return KSEAL_OK;
}

static kseal_status check_pointers(const args_t *a, const struct problem *p) {
    static const char no_drafts[] = "config.spec_decode is 0", no_fp4[] = "config.kv_dtype is not nvfp4";
    enum presence scratch = p->splits > 1 ? NEEDED : OPTIONAL;
    const struct pointer pointers[] = {
        {"q", a->q, LIMIT(ALIGN_Q), NEEDED, NULL},
        {"k", a->k, LIMIT(ALIGN_K), NEEDED, NULL},
        {"v", a->v, LIMIT(ALIGN_V), NEEDED, NULL},
        {"k_scales", a->k_scales, LIMIT(ALIGN_K_SCALES), p->fp4_kv ? NEEDED : UNWANTED, no_fp4},
        {"v_scales", a->v_scales, LIMIT(ALIGN_V_SCALES), p->fp4_kv ? NEEDED : UNWANTED, no_fp4},
        {"o", a->o, LIMIT(ALIGN_O), NEEDED, NULL},
        {"page_table", a->page_table, LIMIT(ALIGN_PAGE_TABLE), NEEDED, NULL},
        {"seq_lens", a->seq_lens, LIMIT(ALIGN_SEQ_LENS), NEEDED, NULL},
        {"q_cu_lens", a->q_cu_lens, LIMIT(ALIGN_Q_CU_LENS), p->drafts ? OPTIONAL : UNWANTED, no_drafts},
        {"mask", a->mask, LIMIT(ALIGN_MASK), p->drafts ? NEEDED : UNWANTED, no_drafts},
        {"sinks", a->sinks, LIMIT(ALIGN_SINKS), OPTIONAL, NULL},
        {"q_scale_ptr", a->q_scale_ptr, LIMIT(ALIGN_Q_SCALE_PTR), OPTIONAL, NULL},
        {"kv_scale_ptr", a->kv_scale_ptr, LIMIT(ALIGN_KV_SCALE_PTR), p->scaled_kv ? OPTIONAL : UNWANTED,
         "config.kv_dtype has 16 bits"},
        {"semaphores", a->semaphores, LIMIT(ALIGN_SEMAPHORES), scratch, NULL},
        {"workspace", a->workspace, LIMIT(ALIGN_WORKSPACE), scratch, NULL},
    };
    for (size_t i = 0; i < sizeof pointers / sizeof *pointers; i++) {
        kseal_status status = check_pointer(&pointers[i]);
        if (status != KSEAL_OK)
            return status;
    }
    return KSEAL_OK;
}

static kseal_status check_scratch(const args_t *a, const struct problem *p) {
    if (a->semaphores_bytes < p->semaphores_bytes)
        REFUSE(KSEAL_WORKSPACE_TOO_SMALL, "semaphores_bytes is %llu; %llu are needed", (unsigned long long)a->semaphores_bytes,
               (unsigned long long)p->semaphores_bytes);
    if (a->workspace_bytes < p->workspace_bytes)
        REFUSE(KSEAL_WORKSPACE_TOO_SMALL, "workspace_bytes is %llu; %llu are needed", (unsigned long long)a->workspace_bytes,
               (unsigned long long)p->workspace_bytes);
    return KSEAL_OK;
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
    kseal_status status = check_heads(a, p);
    if (status == KSEAL_OK)
        status = check_sizes(a, p);
    if (status == KSEAL_OK)
        status = check_numbers(a, p);
    if (status == KSEAL_OK)
        status = check_strides(a, p);
    if (status != KSEAL_OK)
        return status;
    split(handle, a, p);
    return measure(a, p);
}

/* Fills `p` unless the batch is empty. */
static kseal_status plan_batch(const struct kseal_handle *handle, const args_t *a, struct problem *p) {
    *p = problem_of(handle, a);
    if (a->batch_size < 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "batch_size is %lld; it must not be negative", (long long)a->batch_size);
    return a->batch_size == 0 ? KSEAL_OK : plan(handle, a, p);
}

kseal_status kseal_xqa_decode_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p;
    kseal_status status = plan_batch(handle, args, &p);
    if (status == KSEAL_OK)
        *bytes = p.workspace_bytes;
    return status;
}

kseal_status kseal_xqa_decode_launch_semaphores(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p;
    kseal_status status = plan_batch(handle, args, &p);
    if (status == KSEAL_OK)
        *bytes = p.semaphores_bytes;
    return status;
}

/* ---- the launch ---- */

/* KVCacheList<true>: passed by value. */
struct cache_list {
    const void *k, *v;
    const void *page_table;
    const void *seq_lens;
    uint32_t max_pages_per_seq;
};

struct fp4_cache_list {
    const void *k, *v;
    const void *k_scales, *v_scales;
    const void *page_table;
    const void *seq_lens;
    uint32_t max_pages_per_seq;
};

#define MAX_PARAMS 28

struct param_list {
    void *params[MAX_PARAMS];
    int count;
};

static void add(struct param_list *list, void *param) { list->params[list->count++] = param; }

/* A parameter that this variant was compiled without is not in its list at all. */
static void add_if(struct param_list *list, bool present, void *param) {
    if (present)
        add(list, param);
}

static void add_strides(struct param_list *list, struct strides *strides) {
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

static kseal_status launch_gmma(const struct kseal_handle *handle, const struct problem *p) {
    args_t a = *p->args;
    uint32_t kv_heads = (uint32_t)a.num_kv_heads, window = (uint32_t)a.window, batch = (uint32_t)a.batch_size;
    struct cache_list cache = {a.k, a.v, a.page_table, a.seq_lens, (uint32_t)a.max_pages_per_seq};
    uint32_t min_tiles = p->min_tiles;
    struct kseal_tensor_map k, v;
    struct param_list list = {.count = 0};
    kseal_status status = encode_cache(p, a.k, &k);
    if (status == KSEAL_OK)
        status = encode_cache(p, a.v, &v);
    if (status != KSEAL_OK)
        return status;
    add(&list, &kv_heads);
    add_if(&list, p->window, &window);
    add(&list, &a.q_scale);
    add(&list, &a.q_scale_ptr);
    add(&list, &a.o);
    add_if(&list, p->small_out, &a.rcp_out_scale);
    add(&list, &a.q);
    add(&list, &a.sinks);
    add(&list, &cache);
    add(&list, &batch);
    add(&list, &a.kv_scale);
    add(&list, &a.kv_scale_ptr);
    add(&list, &k);
    add(&list, &v);
    add(&list, &a.semaphores);
    add(&list, &a.workspace);
    add(&list, &min_tiles);
    const struct kseal_launch launch = {
        .grid = {1, p->splits, kv_heads * batch},
        .block = {128, 1, 3},
        .pdl = a.pdl != 0,
        .stream = a.stream,
    };
    return kseal_handle_launch_kernel(handle, &launch, list.params);
}

static kseal_status launch_mha(const struct kseal_handle *handle, const struct problem *p) {
    args_t a = *p->args;
    uint32_t kv_heads = (uint32_t)a.num_kv_heads, window = (uint32_t)a.window, batch = (uint32_t)a.batch_size;
    uint32_t q_len = (uint32_t)p->q_len, group = (uint32_t)p->group_size, pages = (uint32_t)a.max_pages_per_seq;
    uint32_t min_tiles = p->min_tiles;
    struct strides kv = p->kv, scales = p->scales;
    struct cache_list cache = {a.k, a.v, a.page_table, a.seq_lens, pages};
    struct fp4_cache_list fp4_cache = {a.k, a.v, a.k_scales, a.v_scales, a.page_table, a.seq_lens, pages};
    struct param_list list = {.count = 0};
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
    add_strides(&list, &kv);
    if (p->fp4_kv)
        add_strides(&list, &scales);
    add(&list, &a.semaphores);
    add(&list, &a.workspace);
    add(&list, &min_tiles);
    const struct kseal_launch launch = {
        .grid = {p->splits, kv_heads * (uint32_t)p->row_blocks, batch},
        .block = {128, 1, 2},
        .pdl = a.pdl != 0,
        .stream = a.stream,
    };
    return kseal_handle_launch_kernel(handle, &launch, list.params);
}

kseal_status kseal_xqa_decode_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p;
    kseal_status status = plan_batch(handle, args, &p);
    if (status != KSEAL_OK || args->batch_size == 0)
        return status;
    status = check_pointers(args, &p);
    if (status == KSEAL_OK)
        status = check_scratch(args, &p);
    if (status == KSEAL_OK)
        status = kseal_handle_check_device(handle);
    if (status != KSEAL_OK)
        return status;
    return p.gmma ? launch_gmma(handle, &p) : launch_mha(handle, &p);
}
