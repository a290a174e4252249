/* Attention over selected positions: from kseal_qsa_selected_args to the argument list of the variant's CuTe host function. */
#include <stdbool.h>
#include <stddef.h>

#include "check.h"
#include "kernseal_ops.h"

#define OP "qsa_selected"
#define LIMIT(name) KSEAL_QSA_SELECTED_LIMIT_##name
#define AXIS(name) KSEAL_QSA_SELECTED_AXIS_##name
#define D LIMIT(HEAD_DIM)
#define INDEX_BITS 31                 /* rows are int32 */
#define STRIDE_END ((int64_t)1 << 40) /* bytes */
#define ADDRESS_END ((int64_t)1 << 57)
#define COPY_BYTES 16 /* of one load of the cache */

typedef kseal_qsa_selected_args args_t;

/* The run with its defaults filled in. */
struct problem {
    const args_t *args;
    int32_t tile_q, splits;
    bool fp8, lse;
    uint32_t element, request; /* bytes */
    int64_t page_stride, token_stride, head_stride;
    uint64_t lse_offset, workspace;
};

/* FlashInfer's choice: enough thread blocks to fill a device when there are few rows, none to merge when there are many. */
static int32_t splits_of(int64_t rows) { return rows == 1 ? 64 : rows <= 4 ? 32 : rows <= 64 ? 16 : 1; }

/* ---- validation: one function per kind of rule, each naming field, value and what is supported ---- */

static kseal_status check_heads(const args_t *a, int32_t most) {
    CHECK(kseal_check_range(OP, "num_kv_heads", a->num_kv_heads, 1, LIMIT(MAX_KV_HEADS)));
    if (a->num_q_heads <= 0 || a->num_q_heads % a->num_kv_heads != 0 || a->num_q_heads / a->num_kv_heads > most)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_q_heads is %d; it must be 1 to %d times num_kv_heads (%d)", a->num_q_heads, most,
               a->num_kv_heads);
    return KSEAL_OK;
}

static kseal_status check_counts(const args_t *a, const struct problem *p) {
    if (a->head_dim != D)
        REFUSE(KSEAL_INVALID_ARGUMENT, "head_dim is %d; it must be %d", a->head_dim, D);
    if (a->splits < 0 || a->splits > LIMIT(MAX_SPLITS))
        REFUSE(KSEAL_INVALID_ARGUMENT, "splits is %d; it must be from 1 to %d, or 0 for FlashInfer's choice", a->splits,
               LIMIT(MAX_SPLITS));
    if (p->splits > 1 && a->num_rows > LIMIT(MAX_SPLIT_ROWS))
        REFUSE(KSEAL_OVERFLOW, "num_rows is %lld; it must be at most %d with splits (%d)", (long long)a->num_rows,
               LIMIT(MAX_SPLIT_ROWS), p->splits);
    return kseal_check_below(OP, "num_rows", a->num_rows, INDEX_BITS);
}

static kseal_status check_tables(const args_t *a) {
    CHECK(kseal_check_range(OP, "num_requests", a->num_requests, 1, INT32_MAX));
    CHECK(kseal_check_range(OP, "max_pages_per_request", a->max_pages_per_request, 1, INT32_MAX));
    CHECK(kseal_check_range(OP, "num_pages", a->num_pages, 1, INT32_MAX));
    CHECK(kseal_check_positive(OP, "page_size", a->page_size));
    CHECK(kseal_check_range(OP, "selection_width", a->selection_width, 1, LIMIT(MAX_SELECTION_WIDTH)));
    return kseal_check_positive_scale(OP, "scale", a->scale);
}

/* Writes the stride to use: `given`, or `dense` where that is 0. `count` steps of it must stay within an address. */
static kseal_status check_stride(const char *name, int64_t given, int64_t dense, int64_t count, uint32_t element,
                                 int64_t *stride) {
    int64_t span;
    *stride = given != 0 ? given : dense;
    if (*stride <= 0 || *stride >= STRIDE_END / element)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %lld; it must be positive and below 2^40 bytes, or 0 for a dense NHD cache", name,
               (long long)*stride);
    if (*stride * element % COPY_BYTES != 0)
        REFUSE(KSEAL_MISALIGNED, "%s is %lld; it must be a multiple of %d bytes", name, (long long)*stride, COPY_BYTES);
    if (__builtin_mul_overflow(*stride * element, count, &span) || span >= ADDRESS_END)
        REFUSE(KSEAL_OVERFLOW, "%s is %lld; the cache must be below 2^57 bytes (%lld of them)", name, (long long)*stride,
               (long long)count);
    return KSEAL_OK;
}

static kseal_status check_strides(const args_t *a, struct problem *p) {
    int64_t token = (int64_t)a->num_kv_heads * D, page;
    if (__builtin_mul_overflow(token, a->page_size, &page))
        page = STRIDE_END;
    CHECK(check_stride("kv_page_stride", a->kv_page_stride, page, a->num_pages, p->element, &p->page_stride));
    CHECK(check_stride("kv_token_stride", a->kv_token_stride, token, a->page_size, p->element, &p->token_stride));
    return check_stride("kv_head_stride", a->kv_head_stride, D, a->num_kv_heads, p->element, &p->head_stride);
}

static kseal_status check_pointers(const args_t *a, const struct problem *p) {
    enum kseal_presence scales = p->fp8 ? KSEAL_NEEDED : KSEAL_UNWANTED;
    enum kseal_presence scratch = p->workspace != 0 ? KSEAL_NEEDED : KSEAL_OPTIONAL;
    const char *scaled = p->fp8 ? "config.kv_dtype is e4m3" : "config.kv_dtype is bf16";
    const struct kseal_pointer pointers[] = {
        {"q", a->q, LIMIT(ALIGN_Q), KSEAL_NEEDED, NULL},
        {"k", a->k, LIMIT(ALIGN_K), KSEAL_NEEDED, NULL},
        {"v", a->v, LIMIT(ALIGN_V), KSEAL_NEEDED, NULL},
        {"k_descale", a->k_descale, LIMIT(ALIGN_K_DESCALE), scales, scaled},
        {"v_descale", a->v_descale, LIMIT(ALIGN_V_DESCALE), scales, scaled},
        {"block_table", a->block_table, LIMIT(ALIGN_BLOCK_TABLE), KSEAL_NEEDED, NULL},
        {"token_to_request", a->token_to_request, p->request, KSEAL_NEEDED, NULL},
        {"selected_positions", a->selected_positions, LIMIT(ALIGN_SELECTED_POSITIONS), KSEAL_NEEDED, NULL},
        {"query_positions", a->query_positions, LIMIT(ALIGN_QUERY_POSITIONS), KSEAL_NEEDED, NULL},
        {"o", a->o, LIMIT(ALIGN_O), KSEAL_NEEDED, NULL},
        {"lse", a->lse, LIMIT(ALIGN_LSE), p->lse ? KSEAL_NEEDED : KSEAL_UNWANTED, SINCE(p, lse)},
        {"workspace", a->workspace, LIMIT(ALIGN_WORKSPACE), scratch, NULL},
    };
    CHECK(kseal_check_pointers(OP, pointers, sizeof pointers / sizeof *pointers));
    return kseal_check_room(OP, "workspace_bytes", a->workspace_bytes, p->workspace);
}

/* What decides the size of the workspace: partial outputs of the splits, then the logarithms of their sums. */
static kseal_status size(const struct kseal_handle *handle, const args_t *a, struct problem *p) {
    const uint32_t *axes = handle->variant->axes;
    bool fp8 = axes[AXIS(KV_DTYPE)] == KSEAL_DTYPE_E4M3;
    *p = (struct problem){
        .args = a,
        .tile_q = (int32_t)axes[AXIS(TILE_Q)],
        .splits = a->splits != 0 ? a->splits : splits_of(a->num_rows),
        .fp8 = fp8,
        .lse = axes[AXIS(LSE)] != 0,
        .element = fp8 ? 1 : 2,
        .request = axes[AXIS(REQUEST_DTYPE)] == KSEAL_DTYPE_I64 ? sizeof(int64_t) : sizeof(int32_t),
    };
    CHECK(kseal_check_not_negative(OP, "num_rows", a->num_rows));
    if (a->num_rows == 0)
        return KSEAL_OK;
    CHECK(check_heads(a, p->tile_q));
    CHECK(check_counts(a, p));
    if (p->splits > 1) {
        uint64_t sums = (uint64_t)a->num_rows * (uint64_t)p->splits * (uint64_t)a->num_q_heads;
        p->lse_offset = sums * D * sizeof(float);
        p->workspace = p->lse_offset + sums * sizeof(float);
    }
    return KSEAL_OK;
}

kseal_status kseal_qsa_selected_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p;
    CHECK(size(handle, args, &p));
    *bytes = p.workspace;
    return KSEAL_OK;
}

/* ---- the choice of a variant ---- */

/* The smallest tile that the query heads of a KV head fit. */
kseal_status kseal_qsa_selected_launch_choose(const args_t *args, uint32_t sm_count, kseal_qsa_selected_config *config) {
    (void)sm_count;
    CHECK(check_heads(args, 32));
    config->tile_q = args->num_q_heads / args->num_kv_heads <= 16 ? 16 : 32;
    return KSEAL_OK;
}

/* ---- the argument list ---- */

static kseal_status launch(const struct kseal_handle *handle, struct problem *p) {
    args_t a = *p->args;
    int32_t rows = (int32_t)a.num_rows, group = a.num_q_heads / a.num_kv_heads;
    void *partial = p->splits > 1 ? a.workspace : NULL;
    void *partial_lse = p->splits > 1 ? (char *)a.workspace + p->lse_offset : NULL;
    void *list[] = {
        &a.q, &a.k, &a.v, &a.k_descale, &a.v_descale, &a.block_table, &a.token_to_request, &a.selected_positions,
        &a.query_positions, &partial, &partial_lse, &a.o, &a.lse,
        &a.num_pages, &a.num_requests, &a.max_pages_per_request, &a.scale, &rows, &p->splits, &a.num_q_heads,
        &a.selection_width, &group, &a.num_kv_heads, &a.page_size,
        &p->page_stride, &p->token_stride, &p->head_stride, &a.stream, NULL, /* where the result goes */
    };
    return kseal_handle_launch(handle, list, (int32_t)(sizeof list / sizeof *list) - 1);
}

kseal_status kseal_qsa_selected_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p;
    CHECK(size(handle, args, &p));
    if (args->num_rows == 0)
        return KSEAL_OK;
    CHECK(check_tables(args));
    CHECK(check_strides(args, &p));
    CHECK(check_pointers(args, &p));
    CHECK(kseal_handle_check_device(handle));
    return launch(handle, &p);
}
