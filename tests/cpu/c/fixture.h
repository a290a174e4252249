/* A bundle on disk, the fake driver under it, and arguments that are right until a test changes one. */
#ifndef TEST_FIXTURE_H
#define TEST_FIXTURE_H

#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <unistd.h>

#include "harness.h"
#include "recorder.h"
#include "stub_host.h"
#include "variant.h"

typedef kseal_gdn_prefill handle_t;
typedef kseal_gdn_prefill_args args_t;
typedef kseal_gdn_prefill_config config_t;

static char bundle_path[256];

static inline void write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    CHECK(file != NULL);
    CHECK(fputs(text, file) >= 0);
    CHECK(fclose(file) == 0);
}

static inline const struct kseal_variant *variant_named(const char *name) {
    for (const struct kseal_variant *v = kseal_variants; v->op != NULL; v++)
        if (strcmp(v->name, name) == 0)
            return v;
    CHECK(!"a variant of that name");
    return NULL;
}

static inline const char *image_path(const char *variant) {
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", bundle_path, variant_named(variant)->file);
    return path;
}

/* The images whose hashes were compiled in: see test_abi_c.py. */
static inline void make_bundle(void) {
    char text[512];
    snprintf(bundle_path, sizeof bundle_path, "%s/kseal-XXXXXX", getenv("TEST_FOLDER"));
    CHECK(mkdtemp(bundle_path) != NULL);
    snprintf(text, sizeof text, "%s/cubin", bundle_path);
    CHECK(mkdir(text, 0700) == 0);
    snprintf(text, sizeof text, "%s/cubin/gdn_prefill", bundle_path);
    CHECK(mkdir(text, 0700) == 0);
    for (const struct kseal_variant *v = kseal_variants; v->op != NULL; v++) {
        snprintf(text, sizeof text, "image of %s, long enough to read", v->name);
        write_file(image_path(v->name), text);
    }
}

static inline kseal_open_args open_args(void) {
    return (kseal_open_args){
        .struct_size = sizeof(kseal_open_args), .abi_version = KSEAL_ABI_VERSION, .bundle_path = bundle_path};
}

static inline kseal_bundle *open_bundle(void) {
    kseal_bundle *bundle;
    make_bundle();
    kseal_open_args args = open_args();
    CHECK(kseal_open(&args, &bundle) == KSEAL_OK);
    return bundle;
}

/* The config of a variant, from its axes: they are the config's fields in order. */
static inline config_t config_of(const char *variant) {
    config_t config = {.struct_size = sizeof config, .device = -1};
    size_t axes = offsetof(config_t, checkpoints) + sizeof config.checkpoints - offsetof(config_t, dtype);
    memcpy(&config.dtype, variant_named(variant)->axes, axes);
    return config;
}

static inline handle_t *prepare(kseal_bundle *bundle, const char *variant) {
    handle_t *handle;
    config_t config = config_of(variant);
    CHECK(kseal_gdn_prefill_prepare(bundle, &config, &handle) == KSEAL_OK);
    return handle;
}

static inline void *at(uintptr_t address) { return (void *)address; }

/* Right for the variant: two sequences of 100 tokens, 4 query heads, 8 value heads. */
static inline args_t args_of(const char *variant) {
    config_t c = config_of(variant);
    args_t a = {
        .struct_size = sizeof a,
        .num_q_heads = 4,
        .num_k_heads = 4,
        .num_v_heads = 8,
        .head_dim = 128,
        .scale = 0.5f,
        .total_tokens = 100,
        .num_seqs = 2,
        .q = at(0x10000),
        .k = at(0x20000),
        .v = at(0x30000),
        .o = at(0x40000),
        .final_state = at(0x50000),
        .cu_seqlens = at(0x60000),
        .workspace = at(0x70000),
        .workspace_bytes = 1 << 20,
    };
    if (c.alpha)
        a.alpha = at(0x80000);
    if (c.beta)
        a.beta = at(0x90000);
    if (c.initial_state)
        a.initial_state = at(0xa0000);
    if (c.pooled) {
        a.pool_rows = 10;
        a.state_indices = at(0xb0000);
    }
    if (c.checkpoints) {
        a.checkpoint_every = 64;
        a.total_checkpoints = 3;
        a.checkpoints = at(0xc0000);
        a.checkpoint_cu_starts = at(0xd0000);
    }
    return a;
}

/* How often the log has a call. */
static inline int logged(const char *call) {
    char wanted[128];
    int count = 0;
    snprintf(wanted, sizeof wanted, "{\"call\": \"%s\"", call);
    for (const char *at = fake_log(); (at = strstr(at, wanted)) != NULL; at++)
        count++;
    return count;
}

#endif
