/*
 * Libraries of several SMs, many bundles, devices and streams in one process. Each library is loaded as a host loads it: by
 * dlopen, private, and closed again. TEST_LIBRARIES names one for SM 9.0 and one for SM 12.0; each lies in its bundle.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernseal.h"
#include "recorder.h"

#define FUNCTIONS(F)                                                                                                       \
    F(kseal_status_name)                                                                                                   \
    F(kseal_last_error)                                                                                                    \
    F(kseal_open)                                                                                                          \
    F(kseal_close)                                                                                                         \
    F(kseal_variant_at)                                                                                                    \
    F(kseal_gdn_prefill_prepare)                                                                                           \
    F(kseal_gdn_prefill_run)                                                                                               \
    F(kseal_gdn_prefill_release)

struct library {
    char folder[512];
    void *handle;
#define MEMBER(name) __typeof__(&name) name;
    FUNCTIONS(MEMBER)
#undef MEMBER
};

#define CHECK(library, condition)                                                                                          \
    do {                                                                                                                   \
        if (!(condition)) {                                                                                                \
            fprintf(stderr, "%s:%d: %s\n  last error: %s\n", __FILE__, __LINE__, #condition, (library)->kseal_last_error()); \
            exit(1);                                                                                                       \
        }                                                                                                                  \
    } while (0)

enum { SM90, SM120, LIBRARIES };

static struct library load(int which) {
    struct library library;
    char paths[1024], *path = NULL, *rest = paths;
    snprintf(paths, sizeof paths, "%s", getenv("TEST_LIBRARIES"));
    for (int i = 0; i <= which; i++)
        path = strtok_r(rest, ":", &rest);
    snprintf(library.folder, sizeof library.folder, "%.*s", (int)(strrchr(path, '/') - path), path);
    library.handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library.handle == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
#define FIND(name)                                                                                                         \
    do {                                                                                                                   \
        void *symbol = dlsym(library.handle, #name);                                                                       \
        memcpy(&library.name, &symbol, sizeof symbol);                                                                     \
    } while (0);
    FUNCTIONS(FIND)
#undef FIND
    return library;
}

static kseal_bundle *open_bundle(const struct library *library) {
    kseal_bundle *bundle;
    kseal_open_args args = {
        .struct_size = sizeof args, .abi_version = KSEAL_ABI_VERSION, .bundle_path = library->folder};
    CHECK(library, library->kseal_open(&args, &bundle) == KSEAL_OK);
    return bundle;
}

static kseal_gdn_prefill_config config_on(int device) {
    return (kseal_gdn_prefill_config){.struct_size = sizeof(kseal_gdn_prefill_config),
                                      .device = device,
                                      .dtype = KSEAL_DTYPE_BF16,
                                      .state_dtype = KSEAL_DTYPE_F32,
                                      .state_layout = KSEAL_STATE_LAYOUT_HVK,
                                      .index_dtype = KSEAL_DTYPE_I64,
                                      .initial_state = 1,
                                      .alpha = 1,
                                      .beta = 1};
}

static kseal_gdn_prefill *prepare(const struct library *library, kseal_bundle *bundle, int device) {
    kseal_gdn_prefill *handle;
    kseal_gdn_prefill_config config = config_on(device);
    CHECK(library, library->kseal_gdn_prefill_prepare(bundle, &config, &handle) == KSEAL_OK);
    return handle;
}

static kseal_gdn_prefill_args args_on(uintptr_t stream) {
    void *memory = (void *)0x10000;
    return (kseal_gdn_prefill_args){.struct_size = sizeof(kseal_gdn_prefill_args),
                                    .num_q_heads = 4,
                                    .num_k_heads = 4,
                                    .num_v_heads = 8,
                                    .head_dim = 128,
                                    .scale = 0.5f,
                                    .total_tokens = 100,
                                    .num_seqs = 2,
                                    .q = memory,
                                    .k = memory,
                                    .v = memory,
                                    .o = memory,
                                    .alpha = memory,
                                    .beta = memory,
                                    .initial_state = memory,
                                    .final_state = memory,
                                    .cu_seqlens = memory,
                                    .workspace = memory,
                                    .workspace_bytes = 1 << 20,
                                    .stream = (void *)stream};
}

static kseal_status run(const struct library *library, kseal_gdn_prefill *handle, uintptr_t stream) {
    kseal_gdn_prefill_args args = args_on(stream);
    return library->kseal_gdn_prefill_run(handle, &args);
}

/* How often the log has a text. */
static int logged(const char *text) {
    int count = 0;
    for (const char *at = fake_log(); (at = strstr(at, text)) != NULL; at++)
        count++;
    return count;
}

static void two_devices_of_two_sms(void) {
    fake_set_device(2, 9, 0, 132);
    fake_set_device_cc(1, 12, 0);
}

static void kernels_for_two_sms_run_in_one_process(void) {
    struct library libraries[LIBRARIES];
    kseal_bundle *bundles[LIBRARIES];
    kseal_gdn_prefill *handles[LIBRARIES];
    two_devices_of_two_sms();
    for (int i = 0; i < LIBRARIES; i++) {
        libraries[i] = load(i);
        bundles[i] = open_bundle(&libraries[i]);
        handles[i] = prepare(&libraries[i], bundles[i], i);
    }
    for (int i = 0; i < LIBRARIES; i++) {
        const struct library *own = &libraries[i], *other = &libraries[1 - i];
        kseal_gdn_prefill_config config = config_on(1 - i);
        kseal_gdn_prefill *refused;
        fake_set_current(i);
        CHECK(own, run(own, handles[i], 0) == KSEAL_OK);
        CHECK(other, run(other, handles[1 - i], 0) == KSEAL_NOT_PREPARED);
        CHECK(own, own->kseal_gdn_prefill_prepare(bundles[i], &config, &refused) == KSEAL_WRONG_SM && refused == NULL);
        CHECK(own, strstr(own->kseal_last_error(), i == SM90 ? "is sm_120; this bundle is for sm_90a" : "is sm_90;") != NULL);
    }
    CHECK(&libraries[0], logged("\"call\": \"load\"") == 2 && logged("\"call\": \"launch\"") == 2);
    for (int i = 0; i < LIBRARIES; i++) {
        CHECK(&libraries[i], libraries[i].kseal_gdn_prefill_release(handles[i]) == KSEAL_OK);
        libraries[i].kseal_close(bundles[i]);
        CHECK(&libraries[i], logged("\"call\": \"unload\"") == i + 1);
        dlclose(libraries[i].handle);
    }
}

static void a_message_belongs_to_its_library(void) {
    struct library one = load(SM90), other = load(SM120);
    kseal_bundle *bundle;
    kseal_open_args args = {.struct_size = sizeof args, .abi_version = KSEAL_ABI_VERSION, .bundle_path = "/nowhere"};
    CHECK(&one, one.kseal_open(&args, &bundle) == KSEAL_MISSING);
    CHECK(&one, strstr(one.kseal_last_error(), "/nowhere") != NULL && strcmp(other.kseal_last_error(), "") == 0);
    dlclose(one.handle);
    dlclose(other.handle);
}

#define BUNDLES 20
static void many_bundles_are_open_at_once_and_close_in_any_order(void) {
    struct library library = load(SM90);
    kseal_bundle *bundles[BUNDLES];
    kseal_gdn_prefill *handles[BUNDLES];
    for (int i = 0; i < BUNDLES; i++) {
        bundles[i] = open_bundle(&library);
        handles[i] = prepare(&library, bundles[i], 0);
    }
    CHECK(&library, logged("\"call\": \"load\"") == 1);
    for (int i = 0; i < BUNDLES; i++) {
        int at = i * 7 % BUNDLES;
        library.kseal_close(bundles[at]);
        CHECK(&library, run(&library, handles[at], 0) == KSEAL_OK);
        CHECK(&library, logged("\"call\": \"unload\"") == 0);
        CHECK(&library, library.kseal_gdn_prefill_release(handles[at]) == KSEAL_OK);
    }
    CHECK(&library, logged("\"call\": \"unload\"") == 1);
    dlclose(library.handle);
}

#define THREADS 8
#define STREAMS 4
#define ROUNDS 25
#define PER_THREAD_STREAM 2
static struct {
    struct library library;
    kseal_gdn_prefill *handle;
} shared;

static uintptr_t stream_of(uintptr_t thread, uintptr_t stream) { return 0x100000 * (thread + 1) + 0x100 * (stream + 1); }

static void *launch_on_own_streams(void *thread) {
    for (int round = 0; round < ROUNDS; round++) {
        for (uintptr_t stream = 0; stream < STREAMS; stream++)
            CHECK(&shared.library, run(&shared.library, shared.handle, stream_of((uintptr_t)thread, stream)) == KSEAL_OK);
        CHECK(&shared.library, run(&shared.library, shared.handle, PER_THREAD_STREAM) == KSEAL_OK);
    }
    return NULL;
}

static void threads_launch_on_streams_of_their_own(void) {
    pthread_t threads[THREADS];
    char text[64];
    shared.library = load(SM90);
    kseal_bundle *bundle = open_bundle(&shared.library);
    shared.handle = prepare(&shared.library, bundle, 0);
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(&shared.library, pthread_create(&threads[i], NULL, launch_on_own_streams, (void *)i) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (uintptr_t thread = 0; thread < THREADS; thread++)
        for (uintptr_t stream = 0; stream < STREAMS; stream++) {
            snprintf(text, sizeof text, "\"stream\": %llu,", (unsigned long long)stream_of(thread, stream));
            CHECK(&shared.library, logged(text) == ROUNDS);
        }
    CHECK(&shared.library, logged("\"stream\": 2,") == THREADS * ROUNDS);
    CHECK(&shared.library, shared.library.kseal_gdn_prefill_release(shared.handle) == KSEAL_OK);
    shared.library.kseal_close(bundle);
    dlclose(shared.library.handle);
}

static int entries(const char *folder) {
    int count = 0;
    DIR *opened = opendir(folder);
    while (readdir(opened) != NULL)
        count++;
    closedir(opened);
    return count;
}

static int mappings_of(const char *name) {
    char line[1024];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps) != NULL)
        count += strstr(line, name) != NULL;
    fclose(maps);
    return count;
}

static void use_and_unload(int which) {
    struct library library = load(which);
    kseal_bundle *bundle = open_bundle(&library);
    kseal_gdn_prefill *handle = prepare(&library, bundle, which);
    kseal_variant_info info = {.struct_size = sizeof info};
    kseal_bundle *refused;
    CHECK(&library, library.kseal_variant_at(bundle, 0, &info) == KSEAL_OK);
    CHECK(&library, library.kseal_open(NULL, &refused) == KSEAL_INVALID_ARGUMENT);
    fake_set_current(which);
    CHECK(&library, run(&library, handle, 0) == KSEAL_OK);
    CHECK(&library, library.kseal_gdn_prefill_release(handle) == KSEAL_OK);
    library.kseal_close(bundle);
    dlclose(library.handle);
}

static void *use_both_and_unload(void *unused) {
    for (int which = 0; which < LIBRARIES; which++)
        use_and_unload(which);
    return unused;
}

#define RELOADS 20
static void a_library_that_is_unloaded_and_loaded_again_leaves_nothing(void) {
    two_devices_of_two_sms();
    use_both_and_unload(NULL);
    int files = entries("/proc/self/fd");
    for (int i = 0; i < RELOADS; i++) {
        pthread_t thread; /* also of its thread-local memory, which goes with the thread */
        if (pthread_create(&thread, NULL, use_both_and_unload, NULL) != 0)
            exit(1);
        pthread_join(thread, NULL);
        use_both_and_unload(NULL);
    }
    struct library library = load(SM90);
    CHECK(&library, entries("/proc/self/fd") == files);
    CHECK(&library, mappings_of("libkernseal.so") > 0);
    CHECK(&library, logged("\"call\": \"load\"") == LIBRARIES * (2 * RELOADS + 1));
    CHECK(&library, logged("\"call\": \"load\"") == logged("\"call\": \"unload\""));
    CHECK(&library, logged("\"call\": \"cuDevicePrimaryCtxRetain\"") == logged("\"call\": \"cuDevicePrimaryCtxRelease\""));
    dlclose(library.handle);
    if (mappings_of("libkernseal.so") != 0) {
        fprintf(stderr, "libkernseal.so is still mapped\n");
        exit(1);
    }
}

/* What the tests for leaks must notice. */
static void a_bundle_that_is_never_closed(void) {
    struct library library = load(SM90);
    open_bundle(&library);
}

#define TEST(name) {#name, name}
static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
    TEST(kernels_for_two_sms_run_in_one_process),
    TEST(a_message_belongs_to_its_library),
    TEST(many_bundles_are_open_at_once_and_close_in_any_order),
    TEST(threads_launch_on_streams_of_their_own),
    TEST(a_library_that_is_unloaded_and_loaded_again_leaves_nothing),
    {"LEAK", a_bundle_that_is_never_closed},
};

int main(int argc, char **argv) {
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++)
        if (argc == 2 && strcmp(argv[1], tests[i].name) == 0) {
            tests[i].run();
            return 0;
        }
    fprintf(stderr, "no test %s\n", argc == 2 ? argv[1] : "named");
    return 2;
}
