/* QSA attention: from kseal_qsa_attention_args to the argument list of the variant's CuTe host function. */
#include "kernseal_ops.h"
#include "list.h"
#include "qsa_attention/policy.h"

#define OP "qsa_attention"
#include "qsa_attention/tables.h"

#define LIMIT(name) KSEAL_QSA_ATTENTION_LIMIT_##name
#define AXIS(name) KSEAL_QSA_ATTENTION_AXIS_##name
#define STRIDE_END ((int64_t)1 << 40) /* bytes, of a tensor map */
#define STRIDE_BYTES 16               /* what every stride of a tensor map is a multiple of */
#define PARTIAL_BYTES 2               /* an element of a split's output: bf16 or f16 */

typedef kseal_qsa_attention_args args_t;

/* The run with its defaults filled in. */
struct problem {
    const args_t *args;
    const uint32_t *axes;
    bool grouped;
    int32_t head_dim, heads_per_kv, tile_q, splits, flat_heads;
    uint32_t element, position; /* bytes */
    struct kseal_qsa_selection selection;
    int64_t page_stride, head_stride, token_stride, indices_stride, table_stride;
    int64_t page_capacity;
    uint64_t stats_offset, workspace;
};

/* ---- validation: one function per kind of rule, each naming field, value and what is supported ---- */

static kseal_status check_heads(const args_t *a, const struct problem *p) {
    int32_t most = (int32_t)at_most(p->tile_q / p->heads_per_kv, LIMIT(MAX_GROUP));
    CHECK(kseal_check_range(OP, "num_kv_heads", a->num_kv_heads, 1, LIMIT(MAX_ROUTES)));
    if (a->num_q_heads != (int64_t)a->num_kv_heads * p->heads_per_kv)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_q_heads is %d; it must be %d times num_kv_heads (%d), as config.heads_per_kv says",
               a->num_q_heads, p->heads_per_kv, a->num_kv_heads);
    if (p->flat_heads != 0 && a->num_kv_heads != p->flat_heads)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_kv_heads is %d; it must be %d, as config.flat_kv_heads says", a->num_kv_heads,
               p->flat_heads);
    if (!p->grouped && a->group != 1)
        REFUSE(KSEAL_INVALID_ARGUMENT, "group is %d; it must be 1, since config.grouped is 0", a->group);
    if (p->grouped && (a->group < 2 || a->group > most))
        REFUSE(KSEAL_INVALID_ARGUMENT, "group is %d; it must be from 2 to %d (config.tile_q is %d, config.heads_per_kv %d)",
               a->group, most, p->tile_q, p->heads_per_kv);
    return KSEAL_OK;
}

static kseal_status check_selection(const args_t *a) {
    CHECK(kseal_check_range(OP, "block_topk", a->block_topk, 1, LIMIT(MAX_TOPK)));
    return kseal_check_range(OP, "max_seq_len", a->max_seq_len, 1, LIMIT(MAX_SEQ_LEN));
}

static kseal_status check_counts(const args_t *a, const struct problem *p) {
    CHECK(check_routes(a->num_routes, LIMIT(MAX_ROUTES), a->total_q, a->group));
    if (!product_below(INDEX_END, a->num_routes * a->group, a->num_q_heads, p->head_dim))
        REFUSE(KSEAL_OVERFLOW, "num_routes is %lld; R * group * Hq * D must be below 2^31 (group is %d, Hq %d, D %d)",
               (long long)a->num_routes, a->group, a->num_q_heads, p->head_dim);
    CHECK(kseal_check_scale(OP, "scale", a->scale));
    return kseal_check_scale(OP, "out_scale", a->out_scale);
}

static kseal_status check_pages(const args_t *a, const struct problem *p) {
    int64_t fragments = p->selection.page_size / kseal_qsa_fragment(&p->selection);
    CHECK(kseal_check_positive(OP, "num_pages", a->num_pages));
    if (!product_below(INDEX_END, a->num_pages, fragments, p->flat_heads > 1 ? p->flat_heads : 1))
        REFUSE(KSEAL_OVERFLOW, "num_pages is %lld; times %lld fragments a page it must be below 2^31", (long long)a->num_pages,
               (long long)fragments * (p->flat_heads > 1 ? p->flat_heads : 1));
    if (p->flat_heads != 0 && !product_below(INDEX_END, a->num_pages, p->selection.page_size, p->flat_heads))
        REFUSE(KSEAL_OVERFLOW, "num_pages is %lld; num_pages * page_size * Hkv must be below 2^31 with config.flat_kv_heads",
               (long long)a->num_pages);
    return KSEAL_OK;
}

static kseal_status check_kv_stride(const char *name, int64_t given, int64_t used, const struct problem *p) {
    if (used <= 0 || used >= STRIDE_END / p->element)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %lld; it must be positive and below 2^40 bytes, or 0 for a dense HND cache", name,
               (long long)given);
    if (used * p->element % STRIDE_BYTES != 0)
        REFUSE(KSEAL_MISALIGNED, "%s is %lld; it must be a multiple of %d bytes", name, (long long)given, STRIDE_BYTES);
    return KSEAL_OK;
}

/* No element of a cache may have two places in it: strides from the smallest up, each beyond what is below it. */
static kseal_status check_overlap(const args_t *a, const struct problem *p) {
    struct {
        int64_t stride, extent;
        const char *name;
    } order[] = {
        {p->token_stride, p->selection.page_size, "kv_token_stride"},
        {p->head_stride, a->num_kv_heads, "kv_head_stride"},
        {p->page_stride, a->num_pages, "kv_page_stride"},
    }, swap;
    for (size_t i = 0; i < 2; i++)
        for (size_t j = 0; j < 2 - i; j++)
            if (order[j].stride > order[j + 1].stride)
                swap = order[j], order[j] = order[j + 1], order[j + 1] = swap;
    int64_t span = p->head_dim;
    for (size_t i = 0; i < 3; i++) {
        int64_t more;
        if (order[i].extent <= 1)
            continue;
        if (order[i].stride < span)
            REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %lld; it must be at least %lld, or parts of the cache overlap", order[i].name,
                   (long long)order[i].stride, (long long)span);
        if (__builtin_mul_overflow(order[i].extent - 1, order[i].stride, &more) || more > INT64_MAX / 4 - span)
            REFUSE(KSEAL_OVERFLOW, "%s is %lld; the cache must fit 2^61 elements", order[i].name, (long long)order[i].stride);
        span += more;
    }
    return KSEAL_OK;
}

static kseal_status check_strides(const args_t *a, struct problem *p) {
    int64_t token = p->head_dim, head = token * p->selection.page_size, page = head * a->num_kv_heads;
    p->token_stride = a->kv_token_stride != 0 ? a->kv_token_stride : token;
    p->head_stride = a->kv_head_stride != 0 ? a->kv_head_stride : head;
    p->page_stride = a->kv_page_stride != 0 ? a->kv_page_stride : page;
    CHECK(check_kv_stride("kv_page_stride", a->kv_page_stride, p->page_stride, p));
    CHECK(check_kv_stride("kv_head_stride", a->kv_head_stride, p->head_stride, p));
    CHECK(check_kv_stride("kv_token_stride", a->kv_token_stride, p->token_stride, p));
    CHECK(check_overlap(a, p));
    if (p->flat_heads != 0 && (p->token_stride != token || p->head_stride != head || p->page_stride != page))
        REFUSE(KSEAL_INVALID_ARGUMENT,
               "kv_page_stride, kv_head_stride, kv_token_stride are %lld, %lld, %lld; they must be %lld, %lld, %lld, since "
               "config.flat_kv_heads is not 0",
               (long long)p->page_stride, (long long)p->head_stride, (long long)p->token_stride, (long long)page,
               (long long)head, (long long)token);
    return KSEAL_OK;
}

/* The tables that an ungrouped variant reads; qsa_metadata reads those of a grouped one. */
static kseal_status check_tables(const args_t *a, struct problem *p) {
    if (p->grouped) {
        CHECK(kseal_check_zero(OP, "num_requests", a->num_requests, SINCE(p, grouped)));
        CHECK(kseal_check_zero(OP, "max_pages_per_request", a->max_pages_per_request, SINCE(p, grouped)));
        CHECK(kseal_check_zero(OP, "block_indices_stride", a->block_indices_stride, SINCE(p, grouped)));
        return kseal_check_zero(OP, "block_table_stride", a->block_table_stride, SINCE(p, grouped));
    }
    CHECK(check_requests(a->num_requests, a->max_pages_per_request, div_up(a->max_seq_len, p->selection.page_size)));
    CHECK(kseal_check_stride(OP, "block_indices_stride", a->block_indices_stride, a->block_topk, 1, &p->indices_stride));
    return kseal_check_stride(OP, "block_table_stride", a->block_table_stride, a->max_pages_per_request, 1, &p->table_stride);
}

static kseal_status check_pointers(const args_t *a, const struct problem *p) {
    enum kseal_presence single = p->grouped ? KSEAL_UNWANTED : KSEAL_NEEDED;
    enum kseal_presence grouped = p->grouped ? KSEAL_NEEDED : KSEAL_UNWANTED;
    const char *since = SINCE(p, grouped);
    const struct kseal_pointer pointers[] = {
        {"q", a->q, LIMIT(ALIGN_Q), KSEAL_NEEDED, NULL},
        {"k", a->k, LIMIT(ALIGN_K), KSEAL_NEEDED, NULL},
        {"v", a->v, LIMIT(ALIGN_V), KSEAL_NEEDED, NULL},
        {"o", a->o, LIMIT(ALIGN_O), KSEAL_NEEDED, NULL},
        {"qo_indptr", a->qo_indptr, LIMIT(ALIGN_QO_INDPTR), KSEAL_NEEDED, NULL},
        {"block_indices", a->block_indices, LIMIT(ALIGN_BLOCK_INDICES), single, since},
        {"block_table", a->block_table, LIMIT(ALIGN_BLOCK_TABLE), single, since},
        {"token_to_request", a->token_to_request, LIMIT(ALIGN_TOKEN_TO_REQUEST), single, since},
        {"query_positions", a->query_positions, p->position, single, since},
        {"page_indices", a->page_indices, LIMIT(ALIGN_PAGE_INDICES), grouped, since},
        {"memberships", a->memberships, LIMIT(ALIGN_MEMBERSHIPS), grouped, since},
        {"kv_lens", a->kv_lens, LIMIT(ALIGN_KV_LENS), grouped, since},
    };
    return kseal_check_pointers(OP, pointers, sizeof pointers / sizeof *pointers);
}

/* Partial outputs of the splits, then the logarithms of their sums. */
static kseal_status size_workspace(const args_t *a, struct problem *p) {
    if (p->splits == 1)
        return KSEAL_OK;
    int64_t rows = a->num_routes * a->num_kv_heads * p->splits;
    int64_t each = (int64_t)a->group * p->heads_per_kv;
    if (!product_below(INDEX_END, rows, each, p->head_dim))
        REFUSE(KSEAL_OVERFLOW,
               "num_routes is %lld; R * Hkv * splits * group * heads_per_kv * D must be below 2^31 (Hkv is %d, splits %d)",
               (long long)a->num_routes, a->num_kv_heads, p->splits);
    int64_t align = LIMIT(ALIGN_WORKSPACE), partial = rows * each * p->head_dim * PARTIAL_BYTES;
    p->stats_offset = (uint64_t)round_up(partial, align);
    p->workspace = p->stats_offset + (uint64_t)(rows * each) * sizeof(float);
    return KSEAL_OK;
}

static kseal_status check_workspace(const args_t *a, const struct problem *p) {
    const struct kseal_pointer workspace = {
        "workspace", a->workspace, LIMIT(ALIGN_WORKSPACE), p->workspace != 0 ? KSEAL_NEEDED : KSEAL_OPTIONAL, NULL};
    CHECK(kseal_check_room(OP, "workspace_bytes", a->workspace_bytes, p->workspace));
    return kseal_check_pointers(OP, &workspace, 1);
}

static struct problem problem_of(const struct kseal_handle *handle, const args_t *a) {
    const uint32_t *axes = handle->variant->axes;
    bool fp8 = axes[AXIS(DTYPE)] == KSEAL_DTYPE_E4M3, grouped = axes[AXIS(GROUPED)] != 0;
    int32_t block = (int32_t)axes[AXIS(BLOCK_SIZE)], tile = (int32_t)axes[AXIS(TILE_Q)];
    return (struct problem){
        .args = a,
        .axes = axes,
        .grouped = grouped,
        .head_dim = (int32_t)axes[AXIS(HEAD_DIM)],
        .heads_per_kv = (int32_t)axes[AXIS(HEADS_PER_KV)],
        .tile_q = tile,
        .splits = (int32_t)axes[AXIS(SPLITS)],
        .flat_heads = (int32_t)axes[AXIS(FLAT_KV_HEADS)],
        .element = fp8 ? 1 : 2,
        .position = axes[AXIS(POSITION_DTYPE)] == KSEAL_DTYPE_I64 ? sizeof(int64_t) : sizeof(int32_t),
        .selection = {
            .group = a->group,
            .block_topk = a->block_topk,
            .block_size = block,
            .page_size = (int32_t)axes[AXIS(PAGE_SIZE)],
            .max_seq_len = a->max_seq_len,
            .count_current = axes[AXIS(COUNT_CURRENT)] != 0,
            .query_major = kseal_qsa_query_major(grouped, fp8, block, tile),
        },
    };
}

/* What decides the size of the workspace. */
static kseal_status check_sizes(const args_t *a, struct problem *p) {
    CHECK(kseal_check_not_negative(OP, "num_routes", a->num_routes));
    if (a->num_routes == 0)
        return KSEAL_OK;
    CHECK(check_heads(a, p));
    CHECK(check_selection(a));
    CHECK(check_counts(a, p));
    return size_workspace(a, p);
}

kseal_status kseal_qsa_attention_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    struct problem p = problem_of(handle, args);
    kseal_status status = check_sizes(args, &p);
    *bytes = status == KSEAL_OK ? p.workspace : 0;
    return status;
}

/* ---- the choice of a variant ---- */

typedef kseal_qsa_attention_config config_t;

static bool dense(const args_t *a, const config_t *c) {
    int64_t token = c->head_dim, head = token * c->page_size, page = head * a->num_kv_heads;
    return (a->kv_token_stride == 0 || a->kv_token_stride == token) && (a->kv_head_stride == 0 || a->kv_head_stride == head) &&
           (a->kv_page_stride == 0 || a->kv_page_stride == page);
}

/* Whether a flat variant exists for such a cache, and can address it. */
static bool flat(const args_t *a, const config_t *c, const struct kseal_qsa_selection *selection) {
    bool heads = a->num_kv_heads == 1 || (a->group > 1 && (a->num_kv_heads == 2 || a->num_kv_heads == 4 || a->num_kv_heads == 8));
    return c->head_dim > 128 && c->tile_q >= KSEAL_QSA_KEEPS && c->dtype != KSEAL_DTYPE_F16 && heads && dense(a, c) &&
           kseal_qsa_fragment(selection) != selection->page_size &&
           product_below(INDEX_END, a->num_pages, c->page_size, a->num_kv_heads);
}

static kseal_status check_choice(const args_t *a, const config_t *c) {
    int32_t most = c->heads_per_kv > 0 && c->heads_per_kv <= KSEAL_QSA_MAX_TILE ? KSEAL_QSA_MAX_TILE / (int32_t)c->heads_per_kv : 0;
    if (most == 0)
        REFUSE(KSEAL_UNSUPPORTED, "config.heads_per_kv is %u; it must be from 1 to %d", c->heads_per_kv, KSEAL_QSA_MAX_TILE);
    if (c->block_size == 0 || c->block_size > KSEAL_QSA_MAX_TILE || c->page_size == 0 || c->page_size > KSEAL_QSA_MAX_TILE)
        REFUSE(KSEAL_UNSUPPORTED, "config.block_size and page_size are %u and %u; they must be from 1 to %d", c->block_size,
               c->page_size, KSEAL_QSA_MAX_TILE);
    if (c->splits > 1)
        REFUSE(KSEAL_INVALID_ARGUMENT, "config.splits is %u; it must be 1 for none, or 0 for as many as the policy likes",
               c->splits);
    most = (int32_t)at_most(most, LIMIT(MAX_GROUP));
    if (a->group < 1 || a->group > most)
        REFUSE(KSEAL_INVALID_ARGUMENT, "group is %d; it must be from 1 to %d (config.heads_per_kv is %u)", a->group, most,
               c->heads_per_kv);
    CHECK(kseal_check_range(OP, "num_kv_heads", a->num_kv_heads, 1, LIMIT(MAX_ROUTES)));
    CHECK(kseal_check_range(OP, "num_routes", a->num_routes, 0, LIMIT(MAX_ROUTES)));
    CHECK(kseal_check_not_negative(OP, "num_pages", a->num_pages));
    return check_selection(a);
}

kseal_status kseal_qsa_attention_launch_choose(const args_t *args, uint32_t sm_count, config_t *config) {
    CHECK(check_choice(args, config));
    const struct kseal_qsa_selection selection = {
        .group = args->group,
        .block_topk = args->block_topk,
        .block_size = (int32_t)config->block_size,
        .page_size = (int32_t)config->page_size,
        .max_seq_len = args->max_seq_len,
        .count_current = config->count_current != 0,
    };
    const struct kseal_qsa_step step = {
        .group = args->group,
        .heads_per_kv = (int32_t)config->heads_per_kv,
        .head_dim = (int32_t)config->head_dim,
        .fp8 = config->dtype == KSEAL_DTYPE_E4M3,
        .split = config->splits == 0,
        .sm_count = sm_count < INT32_MAX ? (int32_t)sm_count : INT32_MAX,
        .routes = args->num_routes > 0 ? args->num_routes : 1,
        .kv_heads = args->num_kv_heads,
        .kv_tokens = kseal_qsa_route_tokens(&selection),
    };
    const struct kseal_qsa_choice choice = kseal_qsa_choose(&step);
    config->grouped = args->group > 1;
    config->tile_q = (uint32_t)choice.tile_q;
    config->splits = (uint32_t)choice.splits;
    config->persistent = choice.persistent;
    config->flat_kv_heads = flat(args, config, &selection) ? (uint32_t)args->num_kv_heads : 0;
    return KSEAL_OK;
}

/* ---- the argument list ---- */

static struct matrix matrix_of(const void *data, int64_t rows, int64_t columns, int64_t stride) {
    return (struct matrix){data, {(int32_t)rows, (int32_t)columns}, stride};
}

/* `selected` and `pages` of the host function: what a route selects, and where that is. */
static struct matrix selected_of(const struct problem *p) {
    const args_t *a = p->args;
    if (p->grouped)
        return matrix_of(a->page_indices, a->num_routes, p->page_capacity, p->page_capacity);
    return matrix_of(a->block_indices, a->total_q, a->block_topk, p->indices_stride);
}

static struct matrix pages_of(const struct problem *p) {
    const args_t *a = p->args;
    int64_t words = div_up(p->page_capacity, 4); /* four fragments' bytes a word */
    if (p->grouped)
        return matrix_of(a->memberships, a->num_routes, words, words);
    return matrix_of(a->block_table, a->num_requests, a->max_pages_per_request, p->table_stride);
}

static kseal_status launch(const struct kseal_handle *handle, struct problem *p) {
    args_t a = *p->args;
    p->page_capacity = kseal_qsa_page_capacity(&p->selection);
    const char *scratch = a.workspace != NULL ? a.workspace : a.o; /* an address that nobody follows, without splits */
    int32_t rows = (int32_t)a.total_q, routes = (int32_t)a.num_routes;
    struct vector q = {a.q, rows}, k = {a.k, 1}, v = {a.v, 1}, o = {a.o, rows}, offsets = {a.qo_indptr, routes + 1};
    struct matrix selected = selected_of(p), pages = pages_of(p);
    struct vector requests = {p->grouped ? a.kv_lens : a.token_to_request, p->grouped ? routes : rows};
    struct vector positions = {p->grouped ? a.kv_lens : a.query_positions, p->grouped ? routes : rows};
    struct vector partial = {scratch, 1}, stats = {scratch + p->stats_offset, 1};
    int32_t kv_capacity = (int32_t)kseal_qsa_route_tokens(&p->selection);
    int32_t page_capacity = (int32_t)p->page_capacity, max_seq_len = (int32_t)a.max_seq_len;
    void *list[] = {
        &q, &k, &v, &o, &offsets, &selected, &pages, &requests, &positions, &partial, &stats,
        &routes, &a.num_kv_heads, &a.group, &kv_capacity, &page_capacity, &max_seq_len,
        &a.num_pages, &p->page_stride, &p->head_stride, &p->token_stride, &p->page_stride, &p->head_stride, &p->token_stride,
        &a.scale, &a.out_scale, &a.stream, NULL, /* where the result goes */
    };
    return kseal_handle_launch(handle, list, (int32_t)(sizeof list / sizeof *list) - 1);
}

kseal_status kseal_qsa_attention_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p = problem_of(handle, args);
    CHECK(check_sizes(args, &p));
    if (args->num_routes == 0)
        return KSEAL_OK;
    CHECK(check_pages(args, &p));
    CHECK(check_strides(args, &p));
    CHECK(check_tables(args, &p));
    CHECK(check_pointers(args, &p));
    CHECK(check_workspace(args, &p));
    CHECK(kseal_handle_check_device(handle));
    return launch(handle, &p);
}
