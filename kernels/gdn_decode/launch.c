/* GDN decode: from kseal_gdn_decode_args to the argument list of the variant's CuTe host function. */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#include "kernseal_ops.h"

#define LIMIT(name) KSEAL_GDN_DECODE_LIMIT_##name
#define D LIMIT(HEAD_DIM)
#define VECTOR 8                            /* elements of a 16-byte load: strides of what is loaded so are multiples */
#define INDEX_END ((int64_t)1 << 31)        /* counts are int32 in the kernels; offsets of rows are not */
#define ADDRESS_END ((int64_t)1 << 60)      /* elements of a tensor, whose bytes must fit int64 */

typedef kseal_gdn_decode_args args_t;

/* The variant's axes and the run's strides with their defaults filled in. */
struct problem {
    const args_t *args;
    int32_t tokens, tiles;
    bool output_indices, intermediate_states;
    uint32_t index_size; /* bytes of an index, and so its alignment */
    int64_t q_stride, k_stride, v_stride, o_stride, a_stride, b_stride, row_stride;
};

kseal_status kseal_gdn_decode_launch_workspace(const struct kseal_handle *handle, const args_t *args, uint64_t *bytes) {
    (void)handle, (void)args;
    *bytes = 0;
    return KSEAL_OK;
}

/* ---- validation: one function per kind of rule, each naming field, value and what is supported ---- */

#define REFUSE(status, ...) return kseal_fail(status, "gdn_decode: " __VA_ARGS__)

/* Whether a * b * c, none negative, is below `end`. */
static bool product_below(int64_t end, int64_t a, int64_t b, int64_t c) {
    int64_t product;
    return !__builtin_mul_overflow(a, b, &product) && !__builtin_mul_overflow(product, c, &product) && product < end;
}

static kseal_status check_heads(const args_t *a) {
    if (a->num_q_heads <= 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_q_heads is %d; it must be positive", a->num_q_heads);
    if (a->num_v_heads <= 0 || a->num_v_heads % a->num_q_heads != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_v_heads is %d; it must be a positive multiple of num_q_heads, which is %d",
               a->num_v_heads, a->num_q_heads);
    if (!product_below(INDEX_END, a->num_v_heads, D * D, 1)) /* within a row of the pool offsets are int32 */
        REFUSE(KSEAL_OVERFLOW, "num_v_heads is %d; it must be below 2^17", a->num_v_heads);
    if (a->head_dim != D)
        REFUSE(KSEAL_INVALID_ARGUMENT, "head_dim is %d; it must be %d", a->head_dim, D);
    return KSEAL_OK;
}

static kseal_status check_counts(const args_t *a, const struct problem *p) {
    if (!isfinite(a->scale) || a->scale == 0.0f)
        REFUSE(KSEAL_INVALID_ARGUMENT, "scale is %g; it must be finite and not 0", (double)a->scale);
    if (!product_below(INDEX_END, a->batch_size, a->num_v_heads, p->tiles))
        REFUSE(KSEAL_OVERFLOW, "batch_size is %lld; B * Hv * D / tile_v must be below 2^31 (Hv is %d, D / tile_v is %d)",
               (long long)a->batch_size, a->num_v_heads, p->tiles);
    if (a->pool_rows <= 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "pool_rows is %lld; it must be positive", (long long)a->pool_rows);
    if (a->pool_rows >= INDEX_END)
        REFUSE(KSEAL_OVERFLOW, "pool_rows is %lld; it must be below 2^31", (long long)a->pool_rows);
    return KSEAL_OK;
}

static kseal_status check_steps(const args_t *a, const struct problem *p) {
    if (!p->intermediate_states && a->intermediate_steps != 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "intermediate_steps is %lld; it must be 0, since config.intermediate_states is 0",
               (long long)a->intermediate_steps);
    if (p->intermediate_states && a->intermediate_steps < p->tokens)
        REFUSE(KSEAL_INVALID_ARGUMENT, "intermediate_steps is %lld; it must be at least config.tokens, which is %d",
               (long long)a->intermediate_steps, p->tokens);
    if (!product_below(INDEX_END, a->batch_size, a->intermediate_steps, a->num_v_heads))
        REFUSE(KSEAL_OVERFLOW, "intermediate_steps is %lld; B * intermediate_steps * Hv must be below 2^31 (B is %lld, Hv is %d)",
               (long long)a->intermediate_steps, (long long)a->batch_size, a->num_v_heads);
    return KSEAL_OK;
}

/* A tensor's distance between its `rows` rows, each of `dense` elements; `*stride` becomes the one to use. */
struct stride_rule {
    const char *name;
    int64_t given, dense, rows;
    int32_t unit;
    int64_t *stride;
};

static kseal_status check_stride(const struct stride_rule *r) {
    *r->stride = r->given != 0 ? r->given : r->dense;
    if (*r->stride < r->dense)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %lld; it must be at least %lld, or 0 for that", r->name, (long long)r->given,
               (long long)r->dense);
    if (*r->stride % r->unit != 0)
        REFUSE(KSEAL_MISALIGNED, "%s is %lld; it must be a multiple of %d", r->name, (long long)r->given, r->unit);
    if (!product_below(ADDRESS_END, *r->stride, r->rows, 1))
        REFUSE(KSEAL_OVERFLOW, "%s is %lld; times %lld rows it must be below 2^60", r->name, (long long)r->given,
               (long long)r->rows);
    return KSEAL_OK;
}

static kseal_status check_strides(const args_t *a, struct problem *p) {
    int64_t rows = a->batch_size * p->tokens, hq = a->num_q_heads, hv = a->num_v_heads;
    const struct stride_rule rules[] = {
        {"q_token_stride", a->q_token_stride, hq * D, rows, VECTOR, &p->q_stride},
        {"k_token_stride", a->k_token_stride, hq * D, rows, VECTOR, &p->k_stride},
        {"v_token_stride", a->v_token_stride, hv * D, rows, VECTOR, &p->v_stride},
        {"o_token_stride", a->o_token_stride, hv * D, rows, VECTOR, &p->o_stride},
        {"a_token_stride", a->a_token_stride, hv, rows, 1, &p->a_stride},
        {"b_token_stride", a->b_token_stride, hv, rows, 1, &p->b_stride},
        {"state_row_stride", a->state_row_stride, hv * D * D, a->pool_rows, VECTOR, &p->row_stride},
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        kseal_status status = check_stride(&rules[i]);
        if (status != KSEAL_OK)
            return status;
    }
    return KSEAL_OK;
}

struct pointer {
    const char *name;
    const void *value;
    uint32_t align;
    bool needed;
    const char *axis; /* of the config, that says so; null where it always is */
};

static kseal_status check_pointer(const struct pointer *p) {
    if (p->value == NULL && p->needed)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is null; it is needed%s%s%s", p->name, p->axis ? ", since config." : "",
               p->axis ? p->axis : "", p->axis ? " is 1" : "");
    if (p->value != NULL && !p->needed)
        REFUSE(KSEAL_INVALID_ARGUMENT, "%s is %p; it must be null, since config.%s is 0", p->name, p->value, p->axis);
    if ((uintptr_t)p->value % p->align != 0)
        REFUSE(KSEAL_MISALIGNED, "%s is %p; it must be aligned to %u bytes", p->name, p->value, p->align);
    return KSEAL_OK;
}

static kseal_status check_pointers(const args_t *a, const struct problem *p) {
    const struct pointer pointers[] = {
        {"q", a->q, LIMIT(ALIGN_Q), true, NULL},
        {"k", a->k, LIMIT(ALIGN_K), true, NULL},
        {"v", a->v, LIMIT(ALIGN_V), true, NULL},
        {"a", a->a, LIMIT(ALIGN_A), true, NULL},
        {"b", a->b, LIMIT(ALIGN_B), true, NULL},
        {"a_log", a->a_log, LIMIT(ALIGN_A_LOG), true, NULL},
        {"dt_bias", a->dt_bias, LIMIT(ALIGN_DT_BIAS), true, NULL},
        {"o", a->o, LIMIT(ALIGN_O), true, NULL},
        {"state", a->state, LIMIT(ALIGN_STATE), true, NULL},
        {"state_indices", a->state_indices, p->index_size, true, NULL},
        {"output_state_indices", a->output_state_indices, p->index_size, p->output_indices, "output_indices"},
        {"intermediate_states", a->intermediate_states, LIMIT(ALIGN_INTERMEDIATE_STATES), p->intermediate_states,
         "intermediate_states"},
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
    const uint32_t *axes = handle->variant->axes;
    *p = (struct problem){
        .args = a,
        .tokens = (int32_t)axes[KSEAL_GDN_DECODE_AXIS_TOKENS],
        .tiles = D / (int32_t)axes[KSEAL_GDN_DECODE_AXIS_TILE_V],
        .output_indices = axes[KSEAL_GDN_DECODE_AXIS_OUTPUT_INDICES] != 0,
        .intermediate_states = axes[KSEAL_GDN_DECODE_AXIS_INTERMEDIATE_STATES] != 0,
        .index_size = axes[KSEAL_GDN_DECODE_AXIS_INDEX_DTYPE] == KSEAL_DTYPE_I64 ? sizeof(int64_t) : sizeof(int32_t),
    };
    kseal_status status = check_heads(a);
    if (status == KSEAL_OK)
        status = check_counts(a, p);
    if (status == KSEAL_OK)
        status = check_steps(a, p);
    if (status == KSEAL_OK)
        status = check_strides(a, p);
    if (status == KSEAL_OK)
        status = check_pointers(a, p);
    return status;
}

/* ---- upstream's rule for a batch; rule.py is the same for torch ---- */

kseal_status kseal_gdn_decode_launch_choose(const args_t *a, uint32_t sm_count, kseal_gdn_decode_config *config) {
    if (config->tokens == 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "config.tokens is 0; it must be positive");
    if (a->batch_size < 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "batch_size is %lld; it must not be negative", (long long)a->batch_size);
    if (a->num_v_heads <= 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "num_v_heads is %d; it must be positive", a->num_v_heads);
    if (!product_below(INDEX_END, a->batch_size, a->num_v_heads, 1))
        REFUSE(KSEAL_OVERFLOW, "batch_size is %lld; B * Hv must be below 2^31 (Hv is %d)", (long long)a->batch_size,
               a->num_v_heads);
    int64_t work = a->batch_size * a->num_v_heads, waves = 4 * (int64_t)sm_count;
    bool one = config->tokens == 1;
    config->wide = work >= (one ? 512 : 128);
    if (config->wide)
        config->tile_v = work >= 1024 ? 128 : work >= 512 ? 64 : 32;
    else if (!one || work <= 128)
        config->tile_v = 16;
    else /* the largest tile of which four waves of CTAs fill the device */
        config->tile_v = work >= waves ? 128 : 2 * work >= waves ? 64 : 32;
    return KSEAL_OK;
}

/* ---- the argument list: tensors as CuTe passes them, the base, then what is not compiled in ---- */

struct vector {
    const void *data;
    int32_t size;
};

/* [B, T, heads] or [B, T, heads, D]. */
struct rows {
    const void *data;
    int32_t batch, heads;
    int64_t batch_stride, token_stride;
};

/* [rows, Hv, D, D]. */
struct pool {
    const void *data;
    int32_t rows, heads;
    int64_t stride;
};

static struct rows rows_of(const struct problem *p, const void *data, int32_t heads, int64_t stride) {
    return (struct rows){data, (int32_t)p->args->batch_size, heads, p->tokens * stride, stride};
}

#define MAX_ARGS 20

struct arg_list {
    void *args[MAX_ARGS];
    int32_t count;
};

static void add(struct arg_list *list, void *arg) { list->args[list->count++] = arg; }

/* An argument that this variant was compiled without is not in its list at all. */
static void add_if(struct arg_list *list, bool present, void *arg) {
    if (present)
        add(list, arg);
}

static kseal_status launch(const struct kseal_handle *handle, const struct problem *p) {
    args_t a = *p->args;
    int32_t hq = a.num_q_heads, hv = a.num_v_heads, batch = (int32_t)a.batch_size, steps = (int32_t)a.intermediate_steps;
    struct pool state = {a.state, (int32_t)a.pool_rows, hv, p->row_stride};
    struct vector intermediate = {a.intermediate_states, batch * steps * hv};
    struct vector a_log = {a.a_log, hv}, dt_bias = {a.dt_bias, hv};
    struct vector indices = {a.state_indices, batch}, output_indices = {a.output_state_indices, batch};
    struct rows q = rows_of(p, a.q, hq, p->q_stride), k = rows_of(p, a.k, hq, p->k_stride);
    struct rows v = rows_of(p, a.v, hv, p->v_stride), o = rows_of(p, a.o, hv, p->o_stride);
    struct rows gate = rows_of(p, a.a, hv, p->a_stride), beta = rows_of(p, a.b, hv, p->b_stride);
    struct arg_list list = {.count = 0};
    add(&list, &state);
    add_if(&list, p->intermediate_states, &intermediate);
    add(&list, &a_log);
    add(&list, &gate);
    add(&list, &dt_bias);
    add(&list, &q);
    add(&list, &k);
    add(&list, &v);
    add(&list, &beta);
    add(&list, &o);
    add(&list, &indices);
    add_if(&list, p->output_indices, &output_indices);
    add(&list, &a.scale);
    add(&list, &hv);
    add(&list, &steps);
    add(&list, &hq);
    add(&list, &a.stream);
    return kseal_handle_launch(handle, list.args, list.count);
}

kseal_status kseal_gdn_decode_launch_run(const struct kseal_handle *handle, const args_t *args) {
    struct problem p;
    if (args->batch_size < 0)
        REFUSE(KSEAL_INVALID_ARGUMENT, "batch_size is %lld; it must not be negative", (long long)args->batch_size);
    if (args->batch_size == 0)
        return KSEAL_OK;
    kseal_status status = validate(handle, args, &p);
    if (status == KSEAL_OK)
        status = kseal_handle_check_device(handle);
    return status == KSEAL_OK ? launch(handle, &p) : status;
}
