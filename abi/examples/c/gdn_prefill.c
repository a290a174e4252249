/*
 * GDN prefill from C: a complete program in one file, linked with libkernseal.so.
 *
 *     cc $(PKG_CONFIG_PATH=BUNDLE/lib/pkgconfig pkg-config --cflags kernseal) -c gdn_prefill.c
 *     cc gdn_prefill.o $(PKG_CONFIG_PATH=BUNDLE/lib/pkgconfig pkg-config --libs kernseal) -o gdn_prefill
 *     LD_LIBRARY_PATH=BUNDLE ./gdn_prefill BUNDLE
 *
 * BUNDLE is a bundle's folder, such as dist/sm_90a-linux-x86_64. Whoever links trusts the libkernseal.so that the dynamic linker
 * finds: verify the bundle first (kernseal verify-bundle BUNDLE), or load the library and check it, as the C++ example does.
 */
#include <dlfcn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernseal.h"

enum { T = 2, D = 128 };

static void fail(const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

static void check(kseal_status status) {
    if (status != KSEAL_OK)
        fail(kseal_status_name(status), kseal_last_error());
}

/* ---- the CUDA driver, as much of it as this example needs; a serving runtime has one already ---- */

static struct {
    int (*init)(unsigned flags);
    int (*retain)(void **context, int device);
    int (*set_current)(void *context);
    int (*allocate)(uint64_t *address, size_t size);
    int (*release)(uint64_t address);
    int (*upload)(uint64_t to, const void *from, size_t size);
    int (*download)(void *to, uint64_t from, size_t size);
    int (*wait)(void);
} cuda;

static void cuda_check(int code) {
    char text[32];
    snprintf(text, sizeof text, "error %d", code);
    if (code != 0)
        fail("CUDA", text);
}

static void find(void *library, const char *name, void *slot) {
    void *symbol = dlsym(library, name);
    if (symbol == NULL)
        fail("libcuda.so.1 has no", name);
    memcpy(slot, &symbol, sizeof symbol);
}

static void start_cuda(void) {
    void *context, *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL)
        fail("libcuda.so.1", dlerror());
    find(library, "cuInit", &cuda.init);
    find(library, "cuDevicePrimaryCtxRetain", &cuda.retain);
    find(library, "cuCtxSetCurrent", &cuda.set_current);
    find(library, "cuMemAlloc_v2", &cuda.allocate);
    find(library, "cuMemFree_v2", &cuda.release);
    find(library, "cuMemcpyHtoD_v2", &cuda.upload);
    find(library, "cuMemcpyDtoH_v2", &cuda.download);
    find(library, "cuCtxSynchronize", &cuda.wait);
    cuda_check(cuda.init(0));
    cuda_check(cuda.retain(&context, 0));
    cuda_check(cuda.set_current(context));
}

static void *allocate(size_t size) {
    uint64_t address;
    cuda_check(cuda.allocate(&address, size));
    return (void *)(uintptr_t)address;
}

static void *upload(const void *values, size_t size) {
    void *address = allocate(size);
    cuda_check(cuda.upload((uintptr_t)address, values, size));
    return address;
}

static void download(void *values, const void *address, size_t size) {
    cuda_check(cuda.download(values, (uintptr_t)address, size));
}

static uint16_t to_bf16(float value) { /* exact for the values used here */
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static float from_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

static void expect(const char *what, float got, float wanted) {
    char text[64];
    snprintf(text, sizeof text, "is %g, expected %g", (double)got, (double)wanted);
    if (!(fabsf(got - wanted) < 1e-2f))
        fail(what, text);
}

/* One sequence of two tokens and one head. k picks column 0, then column 1 of the state; q reads column 0, then both. */
static kseal_gdn_prefill_args problem(void) {
    static uint16_t q[T * D], k[T * D], v[T * D];
    static const float state[D * D], alpha[T] = {1.0f, 0.5f}, beta[T] = {1.0f, 0.25f}; /* alpha is linear: exp(g), not g */
    static const int64_t ends[] = {0, T};
    k[0] = k[D + 1] = q[0] = q[D] = q[D + 1] = to_bf16(1.0f);
    for (int i = 0; i < T * D; i++)
        v[i] = to_bf16(1.0f);
    return (kseal_gdn_prefill_args){
        .struct_size = sizeof(kseal_gdn_prefill_args),
        .num_q_heads = 1,
        .num_k_heads = 1,
        .num_v_heads = 1,
        .head_dim = D,
        .scale = 1.0f,
        .total_tokens = T,
        .num_seqs = 1,
        .q = upload(q, sizeof q),
        .k = upload(k, sizeof k),
        .v = upload(v, sizeof v),
        .o = upload(v, sizeof v),
        .alpha = upload(alpha, sizeof alpha),
        .beta = upload(beta, sizeof beta),
        .initial_state = upload(state, sizeof state),
        .final_state = upload(state, sizeof state),
        .cu_seqlens = upload(ends, sizeof ends),
    };
}

/* The first token stored 1 in column 0. The second halved that, stored 1/4 in column 1, and read both. */
static void check_result(const kseal_gdn_prefill_args *args) {
    static uint16_t o[T * D];
    static float state[D * D];
    download(o, args->o, sizeof o);
    download(state, args->final_state, sizeof state);
    for (int i = 0; i < D; i++) {
        expect("o of token 0", from_bf16(o[i]), 1.0f);
        expect("o of token 1", from_bf16(o[D + i]), 0.75f);
        expect("column 0 of the state", state[i * D], 0.5f);
        expect("column 1 of the state", state[i * D + 1], 0.25f);
        expect("column 2 of the state", state[i * D + 2], 0.0f);
    }
}

static void free_all(const kseal_gdn_prefill_args *a) {
    const void *memory[] = {a->q,    a->k,             a->v,           a->o,          a->alpha,
                            a->beta, a->initial_state, a->final_state, a->cu_seqlens, a->workspace};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        cuda_check(cuda.release((uintptr_t)memory[i]));
}

int main(int argc, char **argv) {
    if (argc != 2)
        fail("usage", "gdn_prefill BUNDLE");
    start_cuda();

    /* README: begin */
    /* 1. Open the bundle. Its images are checked against hashes compiled into the library when they are loaded. */
    kseal_open_args open_args = {
        .struct_size = sizeof open_args, .abi_version = KSEAL_ABI_VERSION, .bundle_path = argv[1]};
    kseal_bundle *bundle;
    check(kseal_open(&open_args, &bundle));

    /* 2. Prepare what does not change between runs: may allocate, must not be under graph capture. */
    kseal_gdn_prefill_config config = {
        .struct_size = sizeof config,
        .device = -1, /* that of the current context */
        .dtype = KSEAL_DTYPE_BF16,
        .state_dtype = KSEAL_DTYPE_F32,
        .state_layout = KSEAL_STATE_LAYOUT_HVK,
        .index_dtype = KSEAL_DTYPE_I64,
        .initial_state = 1,
        .alpha = 1,
        .beta = 1,
    };
    kseal_gdn_prefill *prefill;
    check(kseal_gdn_prefill_prepare(bundle, &config, &prefill));

    /* 3. Sizes, addresses and the stream (here the default one) of one run, and scratch of the size that it asks for. */
    kseal_gdn_prefill_args args = problem();
    check(kseal_gdn_prefill_workspace_size(prefill, &args, &args.workspace_bytes));
    args.workspace = allocate(args.workspace_bytes);

    /* 4. Run: validates and launches on args.stream, nothing else. Then wait, as with any launch. */
    check(kseal_gdn_prefill_run(prefill, &args));
    cuda_check(cuda.wait());
    /* README: end */

    check_result(&args);
    check(kseal_gdn_prefill_release(prefill));
    kseal_close(bundle);
    free_all(&args);
    puts("ok: two tokens of GDN prefill, output and state as expected");
    return 0;
}
