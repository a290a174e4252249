/* Paged MQA logits: from kseal_paged_mqa_logits_args to the argument list of the variant's CuTe host function. */
#include "check.h"
#include "kernseal_ops.h"
#include "list.h"
#include "whole.h"

#define OP "paged_mqa_logits"
#define LIMIT(name) KSEAL_PAGED_MQA_LOGITS_LIMIT_##name
#define AXIS(name) KSEAL_PAGED_MQA_LOGITS_AXIS_##name
#define SCALE_BYTES 4                  /* of a token in a page: one float32, or the powers of two of four groups */
#define PAGE_STRIDE_ALIGN 16           /* bytes; what a TMA descriptor can hold, and below: */
#define STRIDE_BITS 40
#define INDEX_BITS 31                  /* the kernels index logits, pages and positions with int32 */
#define INDEX_END ((int64_t)1 << INDEX_BITS)
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
    if (!product_below(INDEX_END, a->batch_size, p->next_n, 1))
        REFUSE(KSEAL_OVERFLOW, "batch_size is %lld; B * next_n must be below 2^31 (next_n is %lld)", (long long)a->batch_size,
               (long long)p->next_n);
    CHECK(kseal_check_positive(OP, "num_pages", a->num_pages));
    CHECK(kseal_check_below(OP, "num_pages", a->num_pages, INDEX_BITS));
    CHECK(kseal_check_max_pages(OP, a->max_pages_per_seq, p->page_size));
    if (a->max_seq_len > INDEX_END - LIMIT(SEGMENT))
        REFUSE(KSEAL_OVERFLOW, "max_seq_len is %lld; up to 2^31 - %d are supported", (long long)a->max_seq_len, LIMIT(SEGMENT));
    return KSEAL_OK;
}

static kseal_status check_stride(const char *name, int64_t given, int64_t dense, int64_t *stride) {
    CHECK(kseal_check_stride(OP, name, given, dense, 1, stride));
    if (*stride >= (int64_t)1 << STRIDE_BITS)
        REFUSE(KSEAL_OVERFLOW, "%s is %lld; it must be below 2^%d", name, (long long)given, STRIDE_BITS);
    return KSEAL_OK;
}

static kseal_status check_strides(const args_t *a, struct problem *p) {
    CHECK(check_stride("kv_page_stride", a->kv_page_stride, p->page_bytes, &p->kv_stride));
    CHECK(check_stride("page_table_stride", a->page_table_stride, a->max_pages_per_seq, &p->table_stride));
    CHECK(check_stride("seq_len_stride", a->seq_len_stride, 1, &p->len_stride));
    CHECK(check_stride("logits_stride", a->logits_stride, p->padded_len, &p->logits_stride));
    if (p->kv_stride % PAGE_STRIDE_ALIGN != 0)
        REFUSE(KSEAL_MISALIGNED, "kv_page_stride is %lld; it must be a multiple of %d", (long long)p->kv_stride,
               PAGE_STRIDE_ALIGN);
    if (!product_below(ADDRESS_END, p->kv_stride, a->num_pages, 1))
        REFUSE(KSEAL_OVERFLOW, "kv_page_stride is %lld; num_pages * kv_page_stride must be below 2^57 (num_pages is %lld)",
               (long long)p->kv_stride, (long long)a->num_pages);
    if (!product_below(INDEX_END, p->logits_stride, a->batch_size, p->next_n))
        REFUSE(KSEAL_OVERFLOW, "logits_stride is %lld; B * next_n * logits_stride must be below 2^31 (B is %lld, next_n is %lld)",
               (long long)p->logits_stride, (long long)a->batch_size, (long long)p->next_n);
    return KSEAL_OK;
}

static kseal_status check_pointers(const args_t *a, const struct problem *p) {
    enum kseal_presence scales = p->fp4 ? KSEAL_NEEDED : KSEAL_UNWANTED;
    enum kseal_presence schedule = p->scheduled ? KSEAL_NEEDED : KSEAL_UNWANTED;
    const char *no_scales = p->fp4 ? NULL : "config.kv_dtype is not fp4";
    const char *no_schedule = p->scheduled ? NULL : "this class works without one";
    const struct kseal_pointer pointers[] = {
        {"q", a->q, LIMIT(ALIGN_Q), KSEAL_NEEDED, NULL},
        {"q_scales", a->q_scales, LIMIT(ALIGN_Q_SCALES), scales, no_scales},
        {"kv", a->kv, LIMIT(ALIGN_KV), KSEAL_NEEDED, NULL},
        {"weights", a->weights, LIMIT(ALIGN_WEIGHTS), KSEAL_NEEDED, NULL},
        {"page_table", a->page_table, LIMIT(ALIGN_PAGE_TABLE), KSEAL_NEEDED, NULL},
        {"seq_lens", a->seq_lens, LIMIT(ALIGN_SEQ_LENS), KSEAL_NEEDED, NULL},
        {"schedule", a->schedule, LIMIT(ALIGN_SCHEDULE), schedule, no_schedule},
        {"logits", a->logits, LIMIT(ALIGN_LOGITS), KSEAL_NEEDED, NULL},
    };
    return kseal_check_pointers(OP, pointers, sizeof pointers / sizeof *pointers);
}

/* Checks everything and fills in `p`. */
static kseal_status validate(const struct kseal_handle *handle, const args_t *a, struct problem *p) {
    *p = problem_of(handle, a);
    CHECK(check_sizes(a, p));
    p->padded_len = round_up(a->max_seq_len, LIMIT(SEGMENT));
    CHECK(check_strides(a, p));
    return check_pointers(a, p);
}

/* ---- argument lists ---- */

/* A tensor whose elements have a stride that is not compiled in. */
struct strided {
    const void *data;
    int32_t size;
    int64_t stride;
};

/* What both lists have. */
struct tensors {
    struct matrix logits, page_table;
    struct strided seq_lens;
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
    struct strided kv = {a.kv, pages, p->kv_stride};
    struct vector q = {a.q, work}, q_scales = {a.q_scales, work}, weights = {a.weights, work};
    struct vector schedule = {a.schedule, p->ctas + 1};
    struct list list = {.count = 0};
    add(&list, &kv);
    add(&list, &q);
    add_if(&list, p->fp4, &q_scales);
    add(&list, &weights);
    add(&list, &t.logits);
    add(&list, &t.page_table);
    add(&list, &t.seq_lens);
    add(&list, &schedule);
    add(&list, &pages);
    add(&list, &work);
    add(&list, &a.stream);
    return kseal_handle_launch(handle, list.args, list.count);
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
    struct vector q = {a.q, t.rows}, weights = {a.weights, t.rows};
    struct strided values = {a.kv, pages, p->kv_stride};
    const char *first_scale = (const char *)a.kv + p->page_bytes - p->page_size * SCALE_BYTES;
    struct strided scales = {first_scale, pages, p->kv_stride / SCALE_BYTES};
    void *list[] = {&q,     &weights, &values,   &scales,   &t.page_table, &t.seq_lens,
                    &width, &ctas,    &t.logits, &a.stream, NULL /* the result */};
    return kseal_handle_launch(handle, list, sizeof list / sizeof *list - 1);
}

kseal_status kseal_paged_mqa_logits_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p;
    CHECK(kseal_check_not_negative(OP, "batch_size", args->batch_size));
    CHECK(kseal_check_not_negative(OP, "max_seq_len", args->max_seq_len));
    if (args->batch_size == 0 || args->max_seq_len == 0)
        return KSEAL_OK;
    CHECK(validate(handle, args, &p));
    CHECK(kseal_handle_check_device(handle));
    return p.scheduled ? launch_scheduled(handle, &p) : launch_dsa(handle, &p);
}
