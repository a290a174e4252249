/* Paged MQA logits: from kseal_paged_mqa_logits_args to the argument list of the variant's CuTe host function. */
#include <stddef.h>

#include "kernseal_ops.h"

#define LIMIT(name) KSEAL_PAGED_MQA_LOGITS_LIMIT_##name
#define AXIS(name) KSEAL_PAGED_MQA_LOGITS_AXIS_##name
#define SCALE_BYTES 4                  /* of a token in a page: one float32, or the powers of two of four groups */
#define PAGE_STRIDE_ALIGN 16           /* bytes; what a TMA descriptor can hold, and below: */
#define STRIDE_END ((int64_t)1 << 40)
#define INDEX_END ((int64_t)1 << 31)   /* the kernels index logits, pages and positions with int32 */
#define ADDRESS_END ((int64_t)1 << 57) /* bytes that an address can reach */

typedef kseal_paged_mqa_logits_args args_t;

/* The run with its defaults filled in. */
struct problem {
    const args_t *args;
    bool fp4;
    bool scheduled; /* by paged_mqa_schedule; the SM120 class is not */
    int64_t next_n, atoms, page_size, page_bytes; /* atoms: rows of work that a sequence is */
    int64_t padded_len;                           /* columns of logits that may be written */
    int32_t ctas;
    int64_t kv_stride, table_stride, len_stride, logits_stride;
};

kseal_status kseal_paged_mqa_logits_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    (void)handle, (void)args;
    *bytes = 0;
    return KSEAL_OK;
}

/* ---- validation: one function per kind of rule, each naming field, value and what is supported ---- */

#define REFUSE(status, ...) return kseal_fail(status, "paged_mqa_logits: " __VA_ARGS__)

/* Whether a * b, neither negative, is below `end`. */
static bool product_below(int64_t end, int64_t a, int64_t b) {
    int64_t product;
    return !__builtin_mul_overflow(a, b, &product) && product < end;
}

/* Passes over the cache that FP4 logits take: the fewest of equal size that tensor memory holds. recipe.py has the same rule. */
static int64_t fp4_atoms(int64_t next_n) {
    int64_t atoms = 1;
    while (next_n % atoms != 0 || next_n / atoms > LIMIT(MAX_FP4_ATOM))
        atoms++;
    return atoms;
}

static uint32_t builder_of(const struct kseal_handle *handle) {
    return kseal_paged_mqa_logits_classes[handle->variant->class_index].builder;
}

static struct problem problem_of(const struct kseal_handle *handle, const args_t *a) {
    const uint32_t *axes = handle->variant->axes;
    bool fp4 = axes[AXIS(KV_DTYPE)] == KSEAL_DTYPE_FP4;
    int64_t next_n = axes[AXIS(NEXT_N)], page_size = axes[AXIS(PAGE_SIZE)], dim = axes[AXIS(HEAD_DIM)];
    return (struct problem){
        .args = a,
        .fp4 = fp4,
        .scheduled = builder_of(handle) != KSEAL_PAGED_MQA_LOGITS_BUILDER_DSA,
        .next_n = next_n,
        .atoms = fp4 ? fp4_atoms(next_n) : 1,
        .page_size = page_size,
        .page_bytes = page_size * ((fp4 ? dim / 2 : dim) + SCALE_BYTES),
        .ctas = a->num_ctas != 0 ? a->num_ctas : (int32_t)handle->sm_count,
        .len_stride = a->seq_len_stride != 0 ? a->seq_len_stride : 1,
    };
}

static kseal_status check_sizes(const args_t *a, const struct problem *p) {
    if (a->num_ctas < 0 || a->num_ctas > LIMIT(MAX_CTAS))
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_ctas is %d; it must be 1 to %d, or 0 for the SMs of the device", a->num_ctas,
               LIMIT(MAX_CTAS));
    if (!product_below(INDEX_END, a->batch_size, p->next_n))
        REFUSE(KSEAL_OVERFLOW, "batch_size is %lld; B * next_n must be below 2^31 (next_n is %lld)", (long long)a->batch_size,
               (long long)p->next_n);
    if (a->num_pages <= 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_pages is %lld; it must be positive", (long long)a->num_pages);
    if (a->num_pages >= INDEX_END)
        REFUSE(KSEAL_OVERFLOW, "num_pages is %lld; it must be below 2^31", (long long)a->num_pages);
    if (a->max_pages_per_seq <= 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "max_pages_per_seq is %lld; it must be positive", (long long)a->max_pages_per_seq);
    if (!product_below(INDEX_END, a->max_pages_per_seq, p->page_size))
        REFUSE(KSEAL_OVERFLOW, "max_pages_per_seq is %lld; max_pages_per_seq * page_size must be below 2^31 (page_size is %lld)",
               (long long)a->max_pages_per_seq, (long long)p->page_size);
    if (a->max_seq_len > INDEX_END - LIMIT(SEGMENT))
        REFUSE(KSEAL_OVERFLOW, "max_seq_len is %lld; up to 2^31 - %d are supported", (long long)a->max_seq_len, LIMIT(SEGMENT));
    return KSEAL_OK;
}

/* Writes the stride to use: `given`, or `dense` where that is 0. */
static kseal_status check_stride(const char *name, int64_t given, int64_t dense, int64_t *stride) {
    *stride = given != 0 ? given : dense;
    if (*stride < dense)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %lld; it must be at least %lld, or 0 for that", name, (long long)given,
               (long long)dense);
    if (*stride >= STRIDE_END)
        REFUSE(KSEAL_OVERFLOW, "%s is %lld; it must be below 2^40", name, (long long)given);
    return KSEAL_OK;
}

static kseal_status check_strides(const args_t *a, struct problem *p) {
    kseal_status status = check_stride("kv_page_stride", a->kv_page_stride, p->page_bytes, &p->kv_stride);
    if (status == KSEAL_OK)
        status = check_stride("page_table_stride", a->page_table_stride, a->max_pages_per_seq, &p->table_stride);
    if (status == KSEAL_OK)
        status = check_stride("seq_len_stride", a->seq_len_stride, 1, &p->len_stride);
    if (status == KSEAL_OK)
        status = check_stride("logits_stride", a->logits_stride, p->padded_len, &p->logits_stride);
    if (status != KSEAL_OK)
        return status;
    if (p->kv_stride % PAGE_STRIDE_ALIGN != 0)
        REFUSE(KSEAL_MISALIGNED, "kv_page_stride is %lld; it must be a multiple of %d", (long long)p->kv_stride,
               PAGE_STRIDE_ALIGN);
    if (!product_below(ADDRESS_END, p->kv_stride, a->num_pages))
        REFUSE(KSEAL_OVERFLOW, "kv_page_stride is %lld; num_pages * kv_page_stride must be below 2^57 (num_pages is %lld)",
               (long long)p->kv_stride, (long long)a->num_pages);
    if (!product_below(INDEX_END, p->logits_stride, a->batch_size * p->next_n))
        REFUSE(KSEAL_OVERFLOW, "logits_stride is %lld; B * next_n * logits_stride must be below 2^31 (B is %lld, next_n is %lld)",
               (long long)p->logits_stride, (long long)a->batch_size, (long long)p->next_n);
    return KSEAL_OK;
}

/* Where a pointer is not needed, `why` it must be null. */
struct pointer {
    const char *name;
    const void *value;
    uint32_t align;
    bool needed;
    const char *why;
};

static kseal_status check_pointer(const struct pointer *p) {
    if (p->value == NULL && p->needed)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is null; it is needed", p->name);
    if (p->value != NULL && !p->needed)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %p; it must be null, since %s", p->name, p->value, p->why);
    if ((uintptr_t)p->value % p->align != 0)
        REFUSE(KSEAL_MISALIGNED, "%s is %p; it must be aligned to %u bytes", p->name, p->value, p->align);
    return KSEAL_OK;
}

static kseal_status check_pointers(const args_t *a, const struct problem *p) {
    const struct pointer pointers[] = {
        {"q", a->q, LIMIT(ALIGN_Q), true, NULL},
        {"q_scales", a->q_scales, LIMIT(ALIGN_Q_SCALES), p->fp4, "config.kv_dtype is not fp4"},
        {"kv", a->kv, LIMIT(ALIGN_KV), true, NULL},
        {"weights", a->weights, LIMIT(ALIGN_WEIGHTS), true, NULL},
        {"page_table", a->page_table, LIMIT(ALIGN_PAGE_TABLE), true, NULL},
        {"seq_lens", a->seq_lens, LIMIT(ALIGN_SEQ_LENS), true, NULL},
        {"schedule", a->schedule, LIMIT(ALIGN_SCHEDULE), p->scheduled, "this class works without one"},
        {"logits", a->logits, LIMIT(ALIGN_LOGITS), true, NULL},
    };
    for (size_t i = 0; i < sizeof pointers / sizeof *pointers; i++) {
        kseal_status status = check_pointer(&pointers[i]);
        if (status != KSEAL_OK)
            return status;
    }
    return KSEAL_OK;
}

/* Checks everything and fills in `p`. */
static kseal_status validate(const struct kseal_handle *handle, const args_t *a, struct problem *p) {
    *p = problem_of(handle, a);
    kseal_status status = check_sizes(a, p);
    if (status != KSEAL_OK)
        return status;
    p->padded_len = (a->max_seq_len + LIMIT(SEGMENT) - 1) / LIMIT(SEGMENT) * LIMIT(SEGMENT);
    status = check_strides(a, p);
    if (status == KSEAL_OK)
        status = check_pointers(a, p);
    return status;
}

/* ---- argument lists ---- */

/* Tensors as CuTe passes them: the base, then the extents and strides that are not compiled in. */
struct dense {
    const void *data;
    int32_t size;
};
struct vector {
    const void *data;
    int32_t size;
    int64_t stride;
};
struct matrix {
    const void *data;
    int32_t shape[2];
    int64_t stride;
};

/* What both lists have. */
struct tensors {
    struct matrix logits, page_table;
    struct vector seq_lens;
    int32_t rows;
};

static struct tensors tensors_of(const struct problem *p) {
    const args_t *a = p->args;
    int32_t batch = (int32_t)a->batch_size, rows = (int32_t)(a->batch_size * p->next_n);
    return (struct tensors){
        .logits = {a->logits, {rows, (int32_t)a->max_seq_len}, p->logits_stride},
        .page_table = {a->page_table, {batch, (int32_t)a->max_pages_per_seq}, p->table_stride},
        .seq_lens = {a->seq_lens, batch, p->len_stride},
        .rows = rows,
    };
}

/* fp8_paged_mqa_logits and fp4_paged_mqa_logits: queries and weights by rows of work, in a grid that the schedule is for. */
static kseal_status launch_scheduled(const struct kseal_handle *handle, const struct problem *p) {
    args_t a = *p->args;
    struct tensors t = tensors_of(p);
    int32_t work = (int32_t)(a.batch_size * p->atoms), pages = (int32_t)a.num_pages;
    struct vector kv = {a.kv, pages, p->kv_stride};
    struct dense q = {a.q, work}, q_scales = {a.q_scales, work}, weights = {a.weights, work};
    struct dense schedule = {a.schedule, p->ctas + 1};
    void *list[12]; /* the last for the result */
    int32_t count = 0;
    list[count++] = &kv;
    list[count++] = &q;
    if (p->fp4)
        list[count++] = &q_scales;
    list[count++] = &weights;
    list[count++] = &t.logits;
    list[count++] = &t.page_table;
    list[count++] = &t.seq_lens;
    list[count++] = &schedule;
    list[count++] = &pages;
    list[count++] = &work;
    list[count++] = &a.stream;
    return kseal_handle_launch(handle, list, count);
}

/* CTAs that share the pages of one query position, as upstream chooses them: fewer where there are more positions. */
static int32_t ctas_per_row(const struct problem *p, int32_t rows) {
    return p->ctas * (rows < 4 ? 4 : 2);
}

/* dsa_indexer: values and scales of the pages are two views, and every query position has CTAs of its own. */
static kseal_status launch_dsa(const struct kseal_handle *handle, const struct problem *p) {
    args_t a = *p->args;
    struct tensors t = tensors_of(p);
    int32_t pages = (int32_t)a.num_pages, width = (int32_t)a.max_seq_len, ctas = ctas_per_row(p, t.rows);
    struct dense q = {a.q, t.rows}, weights = {a.weights, t.rows};
    struct vector values = {a.kv, pages, p->kv_stride};
    const char *first_scale = (const char *)a.kv + p->page_bytes - p->page_size * SCALE_BYTES;
    struct vector scales = {first_scale, pages, p->kv_stride / SCALE_BYTES};
    void *list[] = {&q,     &weights, &values,   &scales,   &t.page_table, &t.seq_lens,
                    &width, &ctas,    &t.logits, &a.stream, NULL /* the result */};
    return kseal_handle_launch(handle, list, sizeof list / sizeof *list - 1);
}

kseal_status kseal_paged_mqa_logits_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p;
    if (args->batch_size < 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "batch_size is %lld; it must not be negative", (long long)args->batch_size);
    if (args->max_seq_len < 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "max_seq_len is %lld; it must not be negative", (long long)args->max_seq_len);
    if (args->batch_size == 0 || args->max_seq_len == 0)
        return KSEAL_OK;
    kseal_status status = validate(handle, args, &p);
    if (status == KSEAL_OK)
        status = kseal_handle_check_device(handle);
    if (status != KSEAL_OK)
        return status;
    return p.scheduled ? launch_scheduled(handle, &p) : launch_dsa(handle, &p);
}
