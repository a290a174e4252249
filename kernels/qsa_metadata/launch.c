/* QSA metadata: from kseal_qsa_metadata_args to one launch of the map kernel. */
#include <stddef.h>

#include "kernseal_ops.h"
#include "qsa_attention/policy.h"

#define OP "qsa_metadata"
#include "qsa_attention/tables.h"

#define LIMIT(name) KSEAL_QSA_METADATA_LIMIT_##name
#define AXIS(name) KSEAL_QSA_METADATA_AXIS_##name
#define THREADS LIMIT(THREADS)
#define WORD_BITS 32
#define BYTE_MAP_BLOCKS 32768   /* up to so many blocks the map has a byte for each, else a bit */
#define SUMMARY_WORDS 4         /* of each thread, marking the words of its part of a bit map that are in use */
#define MAX_WORDS_PER_THREAD (SUMMARY_WORDS * WORD_BITS)

typedef kseal_qsa_metadata_args args_t;

/* QTokenKvBlockSparseTouchedMetadataParams, with the division as the patch has it. */
struct params {
    const void *block_indices, *block_table, *token_to_request, *query_positions, *qo_indptr;
    void *page_indices, *memberships, *kv_lens;
    int64_t indices_row_stride, indices_column_stride, indices_head_stride, table_row_stride, table_column_stride;
    int32_t rows, routes, requests, table_width, block_topk, page_capacity, membership_words, max_seq_len;
    int32_t model_blocks, model_bits, block_size, block_shift, fragment_size, fragments_per_block;
    uint32_t candidates_per_query, fragments_per_page, pattern_heads;
    int32_t locator_page_stride;
    bool release, count_current;
    int32_t fixed_query_len;
};

_Static_assert(sizeof(struct params) == 184 && offsetof(struct params, indices_row_stride) == 64 &&
                   offsetof(struct params, rows) == 104 && offsetof(struct params, model_blocks) == 136 &&
                   offsetof(struct params, candidates_per_query) == 160 && offsetof(struct params, release) == 176 &&
                   offsetof(struct params, fixed_query_len) == 180,
               "the patch asserts the same of the kernel's");

/* The run with its defaults filled in. */
struct problem {
    const args_t *args;
    bool query_major;
    uint32_t position; /* bytes */
    int64_t indices_stride, table_stride, blocks, smem;
    struct kseal_qsa_selection selection;
};

static bool power_of_two(int32_t value, int32_t from, int32_t to) {
    return value >= from && value <= to && (value & (value - 1)) == 0;
}

/* ---- validation: one function per kind of rule, each naming field, value and what is supported ---- */

static kseal_status check_blocks(const args_t *a, const struct problem *p) {
    if (!power_of_two(a->block_size, 4, 128))
        REFUSE(KSEAL_INVALID_ARGUMENT, "block_size is %d; it must be 4, 8, 16, 32, 64 or 128", a->block_size);
    if (p->query_major && a->block_size != 4)
        REFUSE(KSEAL_INVALID_ARGUMENT, "block_size is %d; it must be 4, since config.query_major is 1", a->block_size);
    if (!power_of_two(a->page_size, 16, 128))
        REFUSE(KSEAL_INVALID_ARGUMENT, "page_size is %d; it must be 16, 32, 64 or 128", a->page_size);
    CHECK(kseal_check_range(OP, "block_topk", a->block_topk, 1, LIMIT(MAX_TOPK)));
    if (a->count_current > 1 || a->pdl > 1)
        REFUSE(KSEAL_INVALID_ARGUMENT, "count_current and pdl are %u and %u; they must be 0 or 1", a->count_current, a->pdl);
    CHECK(kseal_check_range(OP, "flat_kv_heads", a->flat_kv_heads, 0, LIMIT(MAX_ROUTES)));
    return kseal_check_range(OP, "max_seq_len", a->max_seq_len, 1, LIMIT(MAX_SEQ_LEN));
}

static kseal_status check_counts(const args_t *a, const struct problem *p) {
    int64_t capacity = kseal_qsa_page_capacity(&p->selection);
    CHECK(check_routes(a->num_routes, LIMIT(MAX_ROUTES), a->total_q, p->selection.group));
    CHECK(check_requests(a->num_requests, a->max_pages_per_request, div_up(a->max_seq_len, a->page_size)));
    if (a->page_capacity != capacity)
        REFUSE(KSEAL_INVALID_ARGUMENT, "page_capacity is %lld; it must be %lld for these sizes", (long long)a->page_capacity,
               (long long)capacity);
    return KSEAL_OK;
}

static kseal_status check_pointers(const args_t *a, const struct problem *p) {
    const struct kseal_pointer pointers[] = {
        {"qo_indptr", a->qo_indptr, LIMIT(ALIGN_QO_INDPTR), KSEAL_NEEDED, NULL},
        {"block_indices", a->block_indices, LIMIT(ALIGN_BLOCK_INDICES), KSEAL_NEEDED, NULL},
        {"block_table", a->block_table, LIMIT(ALIGN_BLOCK_TABLE), KSEAL_NEEDED, NULL},
        {"token_to_request", a->token_to_request, LIMIT(ALIGN_TOKEN_TO_REQUEST), KSEAL_NEEDED, NULL},
        {"query_positions", a->query_positions, p->position, KSEAL_NEEDED, NULL},
        {"page_indices", a->page_indices, LIMIT(ALIGN_PAGE_INDICES), KSEAL_NEEDED, NULL},
        {"memberships", a->memberships, LIMIT(ALIGN_MEMBERSHIPS), KSEAL_NEEDED, NULL},
        {"kv_lens", a->kv_lens, LIMIT(ALIGN_KV_LENS), KSEAL_NEEDED, NULL},
    };
    return kseal_check_pointers(OP, pointers, sizeof pointers / sizeof *pointers);
}

/* Shared memory of a block: what is fixed for a group (the patch has the same expression), then the map of the model's blocks. */
static kseal_status size_map(const struct kseal_handle *handle, struct problem *p) {
    int64_t fixed = round_up(round_up(2112 + 2052 * (int64_t)p->selection.group, 8) + 40, 16);
    int64_t bits = div_up(p->blocks, WORD_BITS);
    int64_t bytes = div_up(at_most(p->blocks, BYTE_MAP_BLOCKS), 4);
    int64_t each = div_up(at_least(bits, bytes), THREADS);
    int64_t stride = each % 2 == 0 ? each + 1 : each; /* odd: threads walk their parts in different banks */
    int64_t summary = p->blocks > BYTE_MAP_BLOCKS ? SUMMARY_WORDS : 0;
    int64_t most = handle->variant->kernels[0].dynamic_smem;
    p->smem = fixed + THREADS * (stride + summary) * (int64_t)sizeof(uint32_t);
    if (each > MAX_WORDS_PER_THREAD || p->smem > most)
        REFUSE(KSEAL_UNSUPPORTED, "max_seq_len is %lld; a map of its %lld blocks takes %lld bytes of shared memory, %lld are there",
               (long long)p->args->max_seq_len, (long long)p->blocks, (long long)p->smem, (long long)most);
    return KSEAL_OK;
}

static kseal_status validate(const struct kseal_handle *handle, const args_t *a, struct problem *p) {
    const uint32_t *axes = handle->variant->axes;
    *p = (struct problem){
        .args = a,
        .query_major = axes[AXIS(QUERY_MAJOR)] != 0,
        .position = axes[AXIS(POSITION_DTYPE)] == KSEAL_DTYPE_I64 ? sizeof(int64_t) : sizeof(int32_t),
        .selection = {
            .group = (int32_t)axes[AXIS(GROUP)],
            .block_topk = a->block_topk,
            .block_size = a->block_size,
            .page_size = a->page_size,
            .max_seq_len = a->max_seq_len,
            .count_current = a->count_current != 0,
            .query_major = axes[AXIS(QUERY_MAJOR)] != 0,
        },
    };
    CHECK(check_blocks(a, p));
    CHECK(check_counts(a, p));
    CHECK(kseal_check_stride(OP, "block_indices_stride", a->block_indices_stride, a->block_topk, 1, &p->indices_stride));
    CHECK(kseal_check_stride(OP, "block_table_stride", a->block_table_stride, a->max_pages_per_request, 1, &p->table_stride));
    CHECK(check_pointers(a, p));
    p->blocks = div_up(a->max_seq_len, a->block_size);
    return size_map(handle, p);
}

/* ---- the launch ---- */

static int32_t bit_width(uint32_t value) { return value == 0 ? 0 : 32 - __builtin_clz(value); }

static struct params params_of(const struct problem *p) {
    const args_t *a = p->args;
    int32_t fragment = kseal_qsa_fragment(&p->selection), fragments = a->page_size / fragment;
    return (struct params){
        .block_indices = a->block_indices,
        .block_table = a->block_table,
        .token_to_request = a->token_to_request,
        .query_positions = a->query_positions,
        .qo_indptr = a->qo_indptr,
        .page_indices = a->page_indices,
        .memberships = a->memberships,
        .kv_lens = a->kv_lens,
        .indices_row_stride = p->indices_stride,
        .indices_column_stride = 1,
        .table_row_stride = p->table_stride,
        .table_column_stride = 1,
        .rows = (int32_t)a->total_q,
        .routes = (int32_t)a->num_routes,
        .requests = (int32_t)a->num_requests,
        .table_width = (int32_t)a->max_pages_per_request,
        .block_topk = a->block_topk,
        .page_capacity = (int32_t)a->page_capacity,
        .membership_words = (int32_t)div_up(a->page_capacity, 4),
        .max_seq_len = (int32_t)a->max_seq_len,
        .model_blocks = (int32_t)p->blocks,
        .model_bits = bit_width((uint32_t)p->blocks),
        .block_size = a->block_size,
        .block_shift = bit_width((uint32_t)a->block_size) - 1,
        .fragment_size = fragment,
        .fragments_per_block = a->block_size / fragment,
        .candidates_per_query = (uint32_t)a->block_topk + 1,
        .fragments_per_page = (uint32_t)fragments,
        .pattern_heads = 1,
        .locator_page_stride = fragments * (a->flat_kv_heads > 0 ? a->flat_kv_heads : 1),
        .release = a->pdl != 0,
        .count_current = a->count_current != 0,
    };
}

kseal_status kseal_qsa_metadata_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    (void)handle, (void)args; /* none */
    *bytes = 0;
    return KSEAL_OK;
}

kseal_status kseal_qsa_metadata_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p;
    CHECK(kseal_check_not_negative(OP, "num_routes", args->num_routes));
    if (args->num_routes == 0)
        return KSEAL_OK;
    CHECK(validate(handle, args, &p));
    CHECK(kseal_handle_check_device(handle));
    struct params params = params_of(&p);
    const struct kseal_launch launch = {
        .grid = {(uint32_t)args->num_routes, 1, 1},
        .block = {THREADS, 1, 1},
        .smem = (uint32_t)p.smem,
        .stream = args->stream,
    };
    return kseal_handle_launch_kernel(handle, &launch, (void *[]){&params});
}
