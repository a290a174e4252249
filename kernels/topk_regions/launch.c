/* Top-k: from kseal_topk_regions_args to the launch of one of the two kernels made of upstream's RadixTopKKernel_Unified. */
#include <stdbool.h>
#include <stddef.h>

#include "kernseal_ops.h"

#define LIMIT(name) KSEAL_TOPK_REGIONS_LIMIT_##name
#define INDEX_END ((int64_t)1 << 32)   /* the kernel multiplies rows and top_k as uint32 */
#define LENGTH_END ((int64_t)1 << 31)  /* indices are int32 */
#define ARRIVALS_END ((int64_t)1 << 31) /* a group counts the arrivals of its blocks as int32 */
#define ADDRESS_END ((int64_t)1 << 57) /* bytes that an address can reach */
#define THREADS 1024
#define VECTOR_BYTES 16
#define FIXED_SMEM 2080         /* two histograms and five numbers, to 16 bytes; the scores of a chunk follow */
#define GROUP_STATE_BYTES 3104  /* groupStateBytes of the program */
#define GROUP_SCRATCH_BYTES 2048 /* groupScratchBytes */
#define BARRIERS_PER_ROW 7      /* most that a row needs: one at first, one a round of 8 bits, two while it is written */

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

#define REFUSE(status, ...) return kseal_fail(status, "topk_regions: " __VA_ARGS__)

static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t div_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }
static int64_t round_up(int64_t value, int64_t unit) { return div_up(value, unit) * unit; }
static int64_t round_down(int64_t value, int64_t unit) { return value / unit * unit; }

/* Whether a * b, neither negative, is below `end`. */
static bool product_below(int64_t end, int64_t a, int64_t b) {
    int64_t product;
    return !__builtin_mul_overflow(a, b, &product) && product < end;
}

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

static kseal_status check_rows(const args_t *a) {
    if (a->num_rows < 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_rows is %lld; it must not be negative", (long long)a->num_rows);
    return KSEAL_OK;
}

static kseal_status check_sizes(const args_t *a) {
    if (a->top_k <= 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "top_k is %d; it must be positive", a->top_k);
    if (!product_below(INDEX_END, a->num_rows, a->top_k))
        REFUSE(KSEAL_OVERFLOW, "num_rows is %lld; num_rows * top_k must be below 2^32 (top_k is %d)", (long long)a->num_rows,
               a->top_k);
    if (a->max_len <= 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "max_len is %lld; it must be positive", (long long)a->max_len);
    if (a->max_len >= LENGTH_END)
        REFUSE(KSEAL_OVERFLOW, "max_len is %lld; it must be below 2^31", (long long)a->max_len);
    return KSEAL_OK;
}

/* Writes the stride to use: `given` elements, or `width` where that is 0. */
static kseal_status check_stride(const char *name, int64_t given, const char *width_name, int64_t width, int64_t rows,
                                 int64_t elem_bytes, int64_t *stride) {
    *stride = given != 0 ? given : width;
    if (*stride < width)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %lld; it must be 0 or at least %s, %lld", name, (long long)given, width_name,
               (long long)width);
    if (!product_below(ADDRESS_END / elem_bytes, *stride, rows))
        REFUSE(KSEAL_OVERFLOW, "%s is %lld; %lld rows must end below 2^57 bytes", name, (long long)given, (long long)rows);
    return KSEAL_OK;
}

static kseal_status check_unpaged(const char *name, int64_t value) {
    if (value != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %lld; it must be 0, since config.paged is 0", name, (long long)value);
    return KSEAL_OK;
}

static kseal_status check_page_table(const args_t *a, struct problem *p) {
    if (a->page_size <= 0 || a->page_size > LIMIT(MAX_PAGE_SIZE) || (a->page_size & (a->page_size - 1)) != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "page_size is %d; it must be a power of two up to 2^30", a->page_size);
    if (a->num_requests <= 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_requests is %lld; it must be positive", (long long)a->num_requests);
    if (a->num_requests > LENGTH_END)
        REFUSE(KSEAL_OVERFLOW, "num_requests is %lld; row_to_request holds int32, so up to 2^31 are supported",
               (long long)a->num_requests);
    if (a->max_pages <= 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "max_pages is %lld; it must be positive", (long long)a->max_pages);
    if (a->max_pages >= INDEX_END)
        REFUSE(KSEAL_OVERFLOW, "max_pages is %lld; it must be below 2^32", (long long)a->max_pages);
    p->page_bits = (uint32_t)__builtin_ctz((unsigned)a->page_size);
    return check_stride("page_table_stride", a->page_table_stride, "max_pages", a->max_pages, a->num_requests, sizeof(int32_t),
                        &p->page_table_stride);
}

static kseal_status check_strides(const args_t *a, struct problem *p) {
    kseal_status status = check_stride("row_stride", a->row_stride, "max_len", a->max_len, a->num_rows, p->elem_bytes,
                                       &p->row_stride);
    if (status != KSEAL_OK || p->paged)
        return status != KSEAL_OK ? status : check_page_table(a, p);
    status = check_unpaged("page_size", a->page_size);
    if (status == KSEAL_OK)
        status = check_unpaged("num_requests", a->num_requests);
    if (status == KSEAL_OK)
        status = check_unpaged("max_pages", a->max_pages);
    if (status == KSEAL_OK)
        status = check_unpaged("page_table_stride", a->page_table_stride);
    return status;
}

enum presence { UNWANTED, OPTIONAL, NEEDED };

struct pointer {
    const char *name;
    const void *value;
    int64_t align;
    enum presence presence;
    const char *unwanted; /* why, where it is */
};

static kseal_status check_pointer(const struct pointer *p) {
    if (p->value == NULL && p->presence == NEEDED)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is null; it is needed", p->name);
    if (p->value != NULL && p->presence == UNWANTED)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %p; it must be null, since %s", p->name, p->value, p->unwanted);
    if ((uintptr_t)p->value % (uintptr_t)p->align != 0)
        REFUSE(KSEAL_MISALIGNED, "%s is %p; it must be aligned to %lld bytes", p->name, p->value, (long long)p->align);
    return KSEAL_OK;
}

static kseal_status check_pointers(const args_t *a, const struct problem *p) {
    const enum presence if_paged = p->paged ? OPTIONAL : UNWANTED, unless_paged = p->paged ? UNWANTED : OPTIONAL;
    const char *paged = "config.paged is 1", *unpaged = "config.paged is 0";
    const struct pointer pointers[] = {
        {"scores", a->scores, p->elem_bytes, NEEDED, NULL},
        {"lengths", a->lengths, LIMIT(ALIGN_LENGTHS), OPTIONAL, NULL},
        {"row_starts", a->row_starts, LIMIT(ALIGN_ROW_STARTS), OPTIONAL, NULL},
        {"offsets", a->offsets, LIMIT(ALIGN_OFFSETS), unless_paged, paged},
        {"page_table", a->page_table, LIMIT(ALIGN_PAGE_TABLE), p->paged ? NEEDED : UNWANTED, unpaged},
        {"row_to_request", a->row_to_request, LIMIT(ALIGN_ROW_TO_REQUEST), if_paged, unpaged},
        {"page_table_starts", a->page_table_starts, LIMIT(ALIGN_PAGE_TABLE_STARTS), if_paged, unpaged},
        {"indices", a->indices, LIMIT(ALIGN_INDICES), NEEDED, NULL},
        {"values", a->values, p->elem_bytes, unless_paged, paged},
        {"raw_indices", a->raw_indices, LIMIT(ALIGN_RAW_INDICES), if_paged, unpaged},
        {"semaphores", a->semaphores, LIMIT(ALIGN_SEMAPHORES), p->semaphores_bytes > 0 ? NEEDED : OPTIONAL, NULL},
    };
    for (size_t i = 0; i < sizeof pointers / sizeof *pointers; i++) {
        kseal_status status = check_pointer(&pointers[i]);
        if (status != KSEAL_OK)
            return status;
    }
    if (p->paged && a->row_to_request == NULL && a->num_requests != a->num_rows)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_requests is %lld; without row_to_request it must be num_rows, %lld",
               (long long)a->num_requests, (long long)a->num_rows);
    if (p->page_bits != 0 && a->row_starts != NULL && a->page_table_starts == NULL)
        REFUSE(KSEAL_INVALID_ARGUMENT, "page_table_starts is null; with row_starts and a page_size of %d it is needed",
               a->page_size);
    return KSEAL_OK;
}

static kseal_status check_semaphores(const args_t *a, const struct problem *p) {
    if (a->semaphores_bytes < p->semaphores_bytes)
        REFUSE(KSEAL_WORKSPACE_TOO_SMALL, "semaphores_bytes is %llu; %llu are needed", (unsigned long long)a->semaphores_bytes,
               (unsigned long long)p->semaphores_bytes);
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
    int64_t most = p->deterministic ? at_most(LIMIT(MAX_CTAS_PER_GROUP), p->sm_count) : p->sm_count;
    int64_t ctas = p->split.ctas, turns = div_up(p->args->num_rows, p->groups);
    if (ctas > most)
        REFUSE(KSEAL_OVERFLOW, "max_len is %lld; it needs %lld thread blocks at once, up to %lld are supported on this device",
               (long long)p->args->max_len, (long long)ctas, (long long)most);
    if (ctas > 1 && !product_below(ARRIVALS_END, turns * BARRIERS_PER_ROW + 1, ctas))
        REFUSE(KSEAL_OVERFLOW, "num_rows is %lld; groups of %lld thread blocks can take %lld rows in turn (max_len is %lld)",
               (long long)p->args->num_rows, (long long)ctas,
               (long long)(((ARRIVALS_END - 1) / ctas - 1) / BARRIERS_PER_ROW * p->groups), (long long)p->args->max_len);
    return KSEAL_OK;
}

/* Looks at no pointer but to know whether row_starts is given, which counts for a run alone. */
static kseal_status plan(const args_t *a, struct problem *p, bool row_starts) {
    kseal_status status = check_sizes(a);
    if (status == KSEAL_OK)
        status = check_strides(a, p);
    if (status != KSEAL_OK)
        return status;
    const struct split with = split_by(p, 1), without = split_by(p, vector_of(p, false));
    p->split = row_starts ? with : without;
    p->groups = groups_of(p, &p->split);
    p->semaphores_bytes = group_bytes(p, &with) > group_bytes(p, &without) ? group_bytes(p, &with) : group_bytes(p, &without);
    return check_split(p);
}

/* Plans for the sizes alone; a batch of none needs nothing. */
static kseal_status plan_sizes(const struct kseal_handle *handle, const args_t *args, struct problem *p) {
    *p = problem_of(handle, args);
    kseal_status status = check_rows(args);
    return status != KSEAL_OK || args->num_rows == 0 ? status : plan(args, p, false);
}

kseal_status kseal_topk_regions_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p;
    kseal_status status = plan_sizes(handle, args, &p);
    if (status == KSEAL_OK)
        *bytes = 0;
    return status;
}

kseal_status kseal_topk_regions_launch_semaphores(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p;
    kseal_status status = plan_sizes(handle, args, &p);
    if (status == KSEAL_OK)
        *bytes = p.semaphores_bytes;
    return status;
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
    kseal_status status = check_rows(args);
    if (status != KSEAL_OK || args->num_rows == 0)
        return status;
    status = plan(args, &p, args->row_starts != NULL);
    if (status == KSEAL_OK)
        status = check_pointers(args, &p);
    if (status == KSEAL_OK)
        status = check_semaphores(args, &p);
    if (status == KSEAL_OK)
        status = kseal_handle_check_device(handle);
    return status == KSEAL_OK ? launch(handle, &p) : status;
}
