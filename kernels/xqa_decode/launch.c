/* XQA decode: from kseal_xqa_decode_args to the launch of upstream's kernel_mha. */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#include "kernseal_ops.h"

#define LIMIT(name) KSEAL_XQA_DECODE_LIMIT_##name
#define TILE LIMIT(TILE_TOKENS)           /* positions that one block works through at a time: ctaTile.x */
#define INDEX_END ((int64_t)1 << 32)      /* the kernel multiplies and adds heads, rows and bytes of scratch as uint32 */
#define LENGTH_END ((int64_t)1 << 31)     /* seq_lens may be int32 */
#define GRAIN_ROWS 32                     /* query rows whose maxima, or sums, fill ROW_STATE_BYTES */
#define ROW_STATE_BYTES 128
#define SLICE_ELEMS 64                    /* elements of a head in one slice of partial output */

typedef kseal_xqa_decode_args args_t;

/* The run with its defaults filled in. */
struct problem {
    const args_t *args;
    int64_t head_dim, group_size, page_size;
    bool window, small_kv, small_out;
    int64_t capacity; /* positions that a row of the page table can hold */
    uint32_t page_stride, token_stride, head_stride; /* in heads */
    uint32_t splits;
    uint64_t semaphores_bytes, workspace_bytes;
};

/* ---- validation: one function per kind of rule, each naming field, value and what is supported ---- */

#define REFUSE(status, ...) return kseal_fail(status, "xqa_decode: " __VA_ARGS__)

/* Whether a * b, neither negative, is below `end`. */
static bool product_below(int64_t end, int64_t a, int64_t b) {
    int64_t product;
    return !__builtin_mul_overflow(a, b, &product) && product < end;
}

static bool is_small(uint32_t dtype) { return dtype == KSEAL_DTYPE_E4M3 || dtype == KSEAL_DTYPE_I8; }

static struct problem problem_of(const struct kseal_handle *handle, const args_t *a) {
    const uint32_t *axes = handle->variant->axes;
    return (struct problem){
        .args = a,
        .head_dim = axes[KSEAL_XQA_DECODE_AXIS_HEAD_DIM],
        .group_size = axes[KSEAL_XQA_DECODE_AXIS_GROUP_SIZE],
        .page_size = axes[KSEAL_XQA_DECODE_AXIS_PAGE_SIZE],
        .window = axes[KSEAL_XQA_DECODE_AXIS_SLIDING_WINDOW] != 0,
        .small_kv = is_small(axes[KSEAL_XQA_DECODE_AXIS_KV_DTYPE]),
        .small_out = is_small(axes[KSEAL_XQA_DECODE_AXIS_OUT_DTYPE]),
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

static kseal_status check_sizes(const args_t *a, struct problem *p) {
    if (a->batch_size > LIMIT(MAX_GRID))
        REFUSE(KSEAL_OVERFLOW, "batch_size is %lld; up to %d are supported", (long long)a->batch_size, LIMIT(MAX_GRID));
    if (!product_below(INDEX_END, a->batch_size, a->num_q_heads))
        REFUSE(KSEAL_OVERFLOW, "batch_size is %lld; B * Hq must be below 2^32 (Hq is %d)", (long long)a->batch_size,
               a->num_q_heads);
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

/* A scale that goes with 8-bit elements; those of 16 bits have none, and 0 or 1 says so. */
static kseal_status check_small_scale(const char *name, float scale, bool small, const char *of) {
    if (small && !usable(scale))
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %g; it must be finite and not 0", name, (double)scale);
    if (!small && scale != 0.0f && scale != 1.0f)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %g; it must be 0 or 1, since config.%s has 16 bits", name, (double)scale, of);
    return KSEAL_OK;
}

static kseal_status check_numbers(const args_t *a, const struct problem *p) {
    if (a->kv_splits < 0 || a->kv_splits > LIMIT(MAX_KV_SPLITS))
        REFUSE(KSEAL_INVALID_ARGUMENT, "kv_splits is %d; 1 to %d are supported, or 0 for the library's choice", a->kv_splits,
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
        status = check_small_scale("kv_scale", a->kv_scale, p->small_kv, "kv_dtype");
    if (status == KSEAL_OK)
        status = check_small_scale("rcp_out_scale", a->rcp_out_scale, p->small_out, "out_dtype");
    return status;
}

/*
 * Writes the stride to use in heads: `given` elements, or `dense` where that is 0. The kernel multiplies it with an index
 * below `count` as uint32, so a larger product would silently wrap.
 */
static kseal_status check_stride(const char *name, int64_t given, int64_t dense, int64_t count, const struct problem *p,
                                 uint32_t *heads) {
    int64_t stride = given != 0 ? given : dense;
    if (stride < 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %lld; it must be positive, or 0 for %lld", name, (long long)given,
               (long long)dense);
    if (stride % p->head_dim != 0)
        REFUSE(KSEAL_MISALIGNED, "%s is %lld; it must be a multiple of head_dim, %lld", name, (long long)given,
               (long long)p->head_dim);
    if (stride / p->head_dim >= INDEX_END || !product_below(INDEX_END, stride / p->head_dim, count - 1))
        REFUSE(KSEAL_OVERFLOW, "%s is %lld; the last of %lld must begin below 2^32 heads of %lld elements", name,
               (long long)stride, (long long)count, (long long)p->head_dim);
    *heads = (uint32_t)(stride / p->head_dim);
    return KSEAL_OK;
}

static kseal_status check_strides(const args_t *a, struct problem *p) {
    int64_t token = a->num_kv_heads * p->head_dim;
    kseal_status status = check_stride("kv_page_stride", a->kv_page_stride, p->page_size * token, a->num_pages, p, &p->page_stride);
    if (status == KSEAL_OK)
        status = check_stride("kv_token_stride", a->kv_token_stride, token, p->page_size, p, &p->token_stride);
    if (status == KSEAL_OK)
        status = check_stride("kv_head_stride", a->kv_head_stride, p->head_dim, a->num_kv_heads, p, &p->head_stride);
    return status;
}

/* UNWANTED goes with 16-bit elements. */
enum presence { NEEDED, OPTIONAL, UNWANTED };

struct pointer {
    const char *name;
    const void *value;
    uint32_t align;
    enum presence presence;
};

static kseal_status check_pointer(const struct pointer *p) {
    if (p->value == NULL && p->presence == NEEDED)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is null; it is needed", p->name);
    if (p->value != NULL && p->presence == UNWANTED)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %p; it must be null, since config.kv_dtype has 16 bits", p->name, p->value);
    if ((uintptr_t)p->value % p->align != 0)
        REFUSE(KSEAL_MISALIGNED, "%s is %p; it must be aligned to %u bytes", p->name, p->value, p->align);
    return KSEAL_OK;
}

static kseal_status check_pointers(const args_t *a, const struct problem *p) {
    enum presence scratch = p->splits > 1 ? NEEDED : OPTIONAL;
    const struct pointer pointers[] = {
        {"q", a->q, LIMIT(ALIGN_Q), NEEDED},
        {"k", a->k, LIMIT(ALIGN_K), NEEDED},
        {"v", a->v, LIMIT(ALIGN_V), NEEDED},
        {"o", a->o, LIMIT(ALIGN_O), NEEDED},
        {"page_table", a->page_table, LIMIT(ALIGN_PAGE_TABLE), NEEDED},
        {"seq_lens", a->seq_lens, LIMIT(ALIGN_SEQ_LENS), NEEDED},
        {"sinks", a->sinks, LIMIT(ALIGN_SINKS), OPTIONAL},
        {"q_scale_ptr", a->q_scale_ptr, LIMIT(ALIGN_Q_SCALE_PTR), OPTIONAL},
        {"kv_scale_ptr", a->kv_scale_ptr, LIMIT(ALIGN_KV_SCALE_PTR), p->small_kv ? OPTIONAL : UNWANTED},
        {"semaphores", a->semaphores, LIMIT(ALIGN_SEMAPHORES), scratch},
        {"workspace", a->workspace, LIMIT(ALIGN_WORKSPACE), scratch},
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
        REFUSE(KSEAL_WORKSPACE_TOO_SMALL, "semaphores_bytes is %llu; %llu are needed, 4 * B * Hkv",
               (unsigned long long)a->semaphores_bytes, (unsigned long long)p->semaphores_bytes);
    if (a->workspace_bytes < p->workspace_bytes)
        REFUSE(KSEAL_WORKSPACE_TOO_SMALL, "workspace_bytes is %llu; %llu are needed", (unsigned long long)a->workspace_bytes,
               (unsigned long long)p->workspace_bytes);
    return KSEAL_OK;
}

/* ---- how the work is split ---- */

static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

/* As upstream: a block for each SM, but not more for a sequence than it has tiles. */
static uint32_t splits_of(const struct kseal_handle *handle, const args_t *a, const struct problem *p) {
    if (a->kv_splits != 0)
        return (uint32_t)a->kv_splits;
    int64_t longest = a->max_seq_len != 0 ? a->max_seq_len : p->capacity;
    int64_t per_sequence = handle->sm_count / (a->batch_size * a->num_kv_heads);
    int64_t splits = at_most(per_sequence > 1 ? per_sequence : 1, (longest + TILE - 1) / TILE);
    return (uint32_t)at_most(splits, LIMIT(MAX_KV_SPLITS));
}

/* Elements of a head as the kernel keeps it in shared memory and scratch. */
static int64_t padded(int64_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : head_dim <= 256 ? 256 : 512; }

/* As the kernel's MemSegmenter lays scratch out: maxima, sums, then partial outputs, each aligned to its own size. */
static kseal_status measure(const args_t *a, struct problem *p) {
    if (p->splits == 1)
        return KSEAL_OK;
    int64_t blocks = p->splits * a->batch_size * a->num_kv_heads;
    int64_t state = round_up(p->group_size, GRAIN_ROWS) / GRAIN_ROWS * ROW_STATE_BYTES;
    int64_t partial = p->group_size * ROW_STATE_BYTES * (padded(p->head_dim) / SLICE_ELEMS);
    int64_t bytes = round_up(2 * blocks * state, partial) + blocks * partial;
    if (bytes >= INDEX_END)
        REFUSE(KSEAL_OVERFLOW, "kv_splits is %u; scratch of %lld bytes must stay below 2^32 (batch_size is %lld)", p->splits,
               (long long)bytes, (long long)a->batch_size);
    p->semaphores_bytes = (uint64_t)(a->batch_size * a->num_kv_heads) * sizeof(uint32_t);
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
    p->splits = splits_of(handle, a, p);
    return measure(a, p);
}

static kseal_status check_batch(const args_t *a) {
    if (a->batch_size < 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "batch_size is %lld; it must not be negative", (long long)a->batch_size);
    return KSEAL_OK;
}

kseal_status kseal_xqa_decode_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p = problem_of(handle, args);
    kseal_status status = check_batch(args);
    if (status == KSEAL_OK && args->batch_size > 0)
        status = plan(handle, args, &p);
    if (status == KSEAL_OK)
        *bytes = p.workspace_bytes;
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

#define MAX_PARAMS 20

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

static kseal_status launch(const struct kseal_handle *handle, const struct problem *p) {
    args_t a = *p->args;
    struct problem copy = *p;
    uint32_t kv_heads = (uint32_t)a.num_kv_heads, window = (uint32_t)a.window, batch = (uint32_t)a.batch_size;
    struct cache_list cache = {a.k, a.v, a.page_table, a.seq_lens, (uint32_t)a.max_pages_per_seq};
    struct param_list list = {.count = 0};
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
    add(&list, &copy.page_stride);
    add(&list, &copy.token_stride);
    add(&list, &copy.head_stride);
    add(&list, &a.semaphores);
    add(&list, &a.workspace);
    const struct kseal_launch launch = {
        .grid = {p->splits, kv_heads, batch},
        .block = {128, 1, 2},
        .pdl = a.pdl != 0,
        .stream = a.stream,
    };
    return kseal_handle_launch_kernel(handle, &launch, list.params);
}

kseal_status kseal_xqa_decode_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p = problem_of(handle, args);
    kseal_status status = check_batch(args);
    if (status != KSEAL_OK || args->batch_size == 0)
        return status;
    status = plan(handle, args, &p);
    if (status == KSEAL_OK)
        status = check_pointers(args, &p);
    if (status == KSEAL_OK)
        status = check_scratch(args, &p);
    if (status == KSEAL_OK)
        status = kseal_handle_check_device(handle);
    return status == KSEAL_OK ? launch(handle, &p) : status;
}
