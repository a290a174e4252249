/* Top-k: from kseal_topk_regions_args to the launch of one of the two kernels made of upstream's RadixTopKKernel_Unified. */
#include "kernseal_ops.h"

#define OP "topk_regions"
#include "topk_regions/rows.h"

#define LIMIT(name) KSEAL_TOPK_REGIONS_LIMIT_##name
#define INDEX_END ((int64_t)1 << 32)  /* the kernel multiplies rows and top_k as uint32 */
#define LENGTH_END ((int64_t)1 << 31) /* indices are int32 */
#define THREADS 1024
#define VECTOR_BYTES 16
#define FIXED_SMEM 2080         /* two histograms and five numbers, to 16 bytes; the scores of a chunk follow */
#define GROUP_STATE_BYTES 3104  /* groupStateBytes of the program */
#define GROUP_SCRATCH_BYTES 2048 /* groupScratchBytes */

enum { ONE_CTA, CTA_GROUP }; /* kernels of a variant */

typedef kseal_topk_regions_args args_t;

/* How rows are cut. */
struct split {
    int64_t chunk; /* scores that one thread block holds */
    int64_t ctas;  /* that share a row */
    int64_t smem;
};

/* The run with its defaults filled in. */
struct problem {
    const args_t *args;
    bool paged, deterministic;
    int64_t elem_bytes, smem_per_block, sm_count;
    const struct kseal_kernel *kernels;
    int64_t row_stride, page_table_stride;
    uint32_t page_bits;
    struct split split;
    int64_t groups; /* of thread blocks, each of which takes one row after the other */
    uint64_t semaphores_bytes;
};

/* ---- validation: one function per kind of rule, each naming field, value and what is supported ---- */

static struct problem problem_of(const struct kseal_handle *handle, const args_t *a) {
    const uint32_t *axes = handle->variant->axes;
    return (struct problem){
        .args = a,
        .paged = axes[KSEAL_TOPK_REGIONS_AXIS_PAGED] != 0,
        .deterministic = axes[KSEAL_TOPK_REGIONS_AXIS_DETERMINISTIC] != 0,
        .elem_bytes = axes[KSEAL_TOPK_REGIONS_AXIS_DTYPE] == KSEAL_DTYPE_F32 ? 4 : 2,
        .smem_per_block = kseal_topk_regions_classes[handle->variant->class_index].smem_per_block,
        .sm_count = handle->sm_count,
        .kernels = handle->variant->kernels,
    };
}

static kseal_status check_sizes(const args_t *a) {
    CHECK(kseal_check_positive(OP, "top_k", a->top_k));
    if (!product_below(INDEX_END, a->num_rows, a->top_k, 1))
        REFUSE(KSEAL_OVERFLOW, "num_rows is %lld; num_rows * top_k must be below 2^32 (top_k is %d)", (long long)a->num_rows,
               a->top_k);
    CHECK(kseal_check_positive(OP, "max_len", a->max_len));
    return kseal_check_below(OP, "max_len", a->max_len, 31);
}

static kseal_status check_unpaged(const char *name, int64_t value) {
    return kseal_check_zero(OP, name, value, "config.paged is 0");
}

static kseal_status check_page_table(const args_t *a, struct problem *p) {
    if (a->page_size <= 0 || a->page_size > LIMIT(MAX_PAGE_SIZE) || (a->page_size & (a->page_size - 1)) != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "page_size is %d; it must be a power of two up to 2^30", a->page_size);
    CHECK(kseal_check_positive(OP, "num_requests", a->num_requests));
    if (a->num_requests > LENGTH_END)
        REFUSE(KSEAL_OVERFLOW, "num_requests is %lld; row_to_request holds int32, so up to 2^31 are supported",
               (long long)a->num_requests);
    CHECK(kseal_check_positive(OP, "max_pages", a->max_pages));
    CHECK(kseal_check_below(OP, "max_pages", a->max_pages, 32));
    p->page_bits = (uint32_t)__builtin_ctz((unsigned)a->page_size);
    return check_stride("page_table_stride", a->page_table_stride, "max_pages", a->max_pages, a->num_requests, sizeof(int32_t),
                        &p->page_table_stride);
}

static kseal_status check_strides(const args_t *a, struct problem *p) {
    CHECK(check_stride("row_stride", a->row_stride, "max_len", a->max_len, a->num_rows, p->elem_bytes, &p->row_stride));
    if (p->paged)
        return check_page_table(a, p);
    CHECK(check_unpaged("page_size", a->page_size));
    CHECK(check_unpaged("num_requests", a->num_requests));
    CHECK(check_unpaged("max_pages", a->max_pages));
    return check_unpaged("page_table_stride", a->page_table_stride);
}

static kseal_status check_pointers(const args_t *a, const struct problem *p) {
    enum kseal_presence if_paged = p->paged ? KSEAL_OPTIONAL : KSEAL_UNWANTED, unless_paged = p->paged ? KSEAL_UNWANTED : KSEAL_OPTIONAL;
    const char *paged = p->paged ? "config.paged is 1" : NULL, *unpaged = p->paged ? NULL : "config.paged is 0";
    uint32_t elem = (uint32_t)p->elem_bytes;
    const struct kseal_pointer pointers[] = {
        {"scores", a->scores, elem, KSEAL_NEEDED, NULL},
        {"lengths", a->lengths, LIMIT(ALIGN_LENGTHS), KSEAL_OPTIONAL, NULL},
        {"row_starts", a->row_starts, LIMIT(ALIGN_ROW_STARTS), KSEAL_OPTIONAL, NULL},
        {"offsets", a->offsets, LIMIT(ALIGN_OFFSETS), unless_paged, paged},
        {"page_table", a->page_table, LIMIT(ALIGN_PAGE_TABLE), p->paged ? KSEAL_NEEDED : KSEAL_UNWANTED, unpaged},
        {"row_to_request", a->row_to_request, LIMIT(ALIGN_ROW_TO_REQUEST), if_paged, unpaged},
        {"page_table_starts", a->page_table_starts, LIMIT(ALIGN_PAGE_TABLE_STARTS), if_paged, unpaged},
        {"indices", a->indices, LIMIT(ALIGN_INDICES), KSEAL_NEEDED, NULL},
        {"values", a->values, elem, unless_paged, paged},
        {"raw_indices", a->raw_indices, LIMIT(ALIGN_RAW_INDICES), if_paged, unpaged},
        {"semaphores", a->semaphores, LIMIT(ALIGN_SEMAPHORES), p->semaphores_bytes > 0 ? KSEAL_NEEDED : KSEAL_OPTIONAL, NULL},
    };
    CHECK(kseal_check_pointers(OP, pointers, sizeof pointers / sizeof *pointers));
    if (p->paged && a->row_to_request == NULL && a->num_requests != a->num_rows)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_requests is %lld; without row_to_request it must be num_rows, %lld",
               (long long)a->num_requests, (long long)a->num_rows);
    if (p->page_bits != 0 && a->row_starts != NULL && a->page_table_starts == NULL)
        REFUSE(KSEAL_INVALID_ARGUMENT, "page_table_starts is null; with row_starts and a page_size of %d it is needed",
               a->page_size);
    return KSEAL_OK;
}

/* ---- how rows are cut, as upstream's launchers do it ---- */

/* Scores whose boundaries chunks keep. Unlike upstream's, it does not follow from where the scores lie. */
static int64_t vector_of(const struct problem *p, bool row_starts) {
    int64_t widest = VECTOR_BYTES / p->elem_bytes;
    return row_starts ? 1 : at_most(widest, p->row_stride & -p->row_stride);
}

/* Scores that fit into `smem` bytes. */
static int64_t capacity(const struct problem *p, int64_t smem, int64_t vector) {
    return round_down((smem - FIXED_SMEM) / p->elem_bytes, vector);
}

static struct split split_by(const struct problem *p, int64_t vector) {
    int64_t len = p->args->max_len;
    struct split s = {.ctas = div_up(len, capacity(p, p->smem_per_block, vector))};
    for (;;) {
        /* What else the kernel has in shared memory counts only where it is in the way, and differs between the two. */
        int64_t room = p->kernels[s.ctas == 1 ? ONE_CTA : CTA_GROUP].dynamic_smem;
        s.chunk = round_up(div_up(len, s.ctas), vector);
        s.smem = FIXED_SMEM + s.chunk * p->elem_bytes;
        if (s.smem <= room)
            return s;
        s.ctas = at_least(s.ctas + 1, div_up(len, capacity(p, room, vector)));
    }
}

static int64_t groups_of(const struct problem *p, const struct split *s) {
    return at_least(1, at_most(p->sm_count / s->ctas, p->args->num_rows));
}

static uint64_t group_bytes(const struct problem *p, const struct split *s) {
    if (s->ctas == 1)
        return 0;
    return (uint64_t)groups_of(p, s) * (GROUP_STATE_BYTES + (p->deterministic ? GROUP_SCRATCH_BYTES : 0));
}

static kseal_status check_split(const struct problem *p) {
    int64_t rows = p->args->num_rows;
    int64_t most = p->deterministic ? at_most(LIMIT(MAX_CTAS_PER_GROUP), p->sm_count) : p->sm_count;
    return check_groups("num_rows", rows, rows, p->args->max_len, p->groups, p->split.ctas, most);
}

/* A batch of none needs nothing. Looks at no pointer but to know whether row_starts is given, which counts for a run alone. */
static kseal_status plan(const args_t *a, struct problem *p, bool row_starts) {
    CHECK(kseal_check_not_negative(OP, "num_rows", a->num_rows));
    if (a->num_rows == 0)
        return KSEAL_OK;
    CHECK(check_sizes(a));
    CHECK(check_strides(a, p));
    const struct split with = split_by(p, 1), without = split_by(p, vector_of(p, false));
    p->split = row_starts ? with : without;
    p->groups = groups_of(p, &p->split);
    p->semaphores_bytes = group_bytes(p, &with) > group_bytes(p, &without) ? group_bytes(p, &with) : group_bytes(p, &without);
    return check_split(p);
}

kseal_status kseal_topk_regions_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p = problem_of(handle, args);
    CHECK(plan(args, &p, false));
    *bytes = 0;
    return KSEAL_OK;
}

kseal_status kseal_topk_regions_launch_semaphores(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p = problem_of(handle, args);
    CHECK(plan(args, &p, false));
    *bytes = p.semaphores_bytes;
    return KSEAL_OK;
}

/* ---- the launch ---- */

/* ConfigurablePageTableKernelPolicy<int32_t>: passed by value. */
struct transform {
    void *raw_indices;
    int64_t row_stride;
    uint32_t page_bits;
    uint32_t padding;
};

static kseal_status launch(const struct kseal_handle *handle, const struct problem *p) {
    args_t a = *p->args;
    bool grouped = p->split.ctas > 1;
    const void *starts = a.page_table_starts != NULL ? a.page_table_starts : a.row_starts;
    const void *page_table_starts = p->paged ? starts : NULL;
    const void *aux = p->paged ? a.page_table : a.offsets;
    void *scratch = grouped && p->deterministic ? (char *)a.semaphores + p->groups * GROUP_STATE_BYTES : NULL;
    struct transform transform = {a.raw_indices, p->row_stride, p->page_bits, 0};
    uint32_t top_k = (uint32_t)a.top_k, max_len = (uint32_t)a.max_len, rows = (uint32_t)a.num_rows;
    uint32_t chunk = (uint32_t)p->split.chunk, ctas = (uint32_t)p->split.ctas;
    int64_t aux_stride = p->page_table_stride;
    void *params[] = {&a.scores,         &a.indices,  &a.values, &aux,     &a.lengths, &a.row_starts, &page_table_starts,
                      &a.row_to_request, &aux_stride, &top_k,    &max_len, &rows,      &a.semaphores, &scratch,
                      &chunk,            &ctas,       &transform};
    const struct kseal_launch launch = {
        .grid = {(uint32_t)p->groups * ctas, 1, 1},
        .block = {THREADS, 1, 1},
        .kernel = grouped ? CTA_GROUP : ONE_CTA,
        .smem = (uint32_t)p->split.smem,
        .stream = a.stream,
    };
    return kseal_handle_launch_kernel(handle, &launch, params);
}

kseal_status kseal_topk_regions_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p = problem_of(handle, args);
    CHECK(plan(args, &p, args->row_starts != NULL));
    if (args->num_rows == 0)
        return KSEAL_OK;
    CHECK(check_pointers(args, &p));
    CHECK(kseal_check_room(OP, "semaphores_bytes", args->semaphores_bytes, p.semaphores_bytes));
    CHECK(kseal_handle_check_device(handle));
    return launch(handle, &p);
}
