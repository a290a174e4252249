/* Several threads prepare, run, fail and release the same variants at once. Built with ThreadSanitizer where there is one. */
#define _GNU_SOURCE
#include <pthread.h>

#include "fixture.h"

#define THREADS 8
#define ROUNDS 100

static kseal_bundle *bundle;
static handle_t *shared;

static void *work(void *arg) {
    const char *variant = (uintptr_t)arg % 2 == 0 ? "packed" : "pooled";
    char wanted[64];
    for (int round = 0; round < ROUNDS; round++) {
        handle_t *own;
        config_t config = config_of(variant);
        args_t a = args_of(variant);
        CHECK(kseal_gdn_prefill_prepare(bundle, &config, &own) == KSEAL_OK);
        CHECK(kseal_gdn_prefill_run(own, &a) == KSEAL_OK);
        args_t b = args_of("packed");
        CHECK(kseal_gdn_prefill_run(shared, &b) == KSEAL_OK);
        /* Each thread sees its own message. */
        a.head_dim = (int32_t)(1000 + (uintptr_t)arg);
        snprintf(wanted, sizeof wanted, "head_dim is %d;", a.head_dim);
        REFUSES(KSEAL_INVALID_ARGUMENT, kseal_gdn_prefill_run(own, &a), wanted);
        CHECK(kseal_gdn_prefill_release(own) == KSEAL_OK);
        CHECK(strstr(kseal_last_error(), wanted) != NULL);
    }
    return NULL;
}

TEST(threads_prepare_run_fail_and_release_at_once) {
    pthread_t threads[THREADS];
    bundle = open_bundle();
    shared = prepare(bundle, "packed");
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(kseal_gdn_prefill_release(shared) == KSEAL_OK);
    CHECK(logged("load") == logged("unload"));
    kseal_close(bundle);
}

static void *open_and_close(void *arg) {
    kseal_bundle *own;
    kseal_open_args args = open_args();
    (void)arg;
    for (int round = 0; round < ROUNDS; round++) {
        CHECK(kseal_open(&args, &own) == KSEAL_OK);
        kseal_close(own);
    }
    return NULL;
}

TEST(threads_open_at_once_and_the_driver_starts_once) {
    pthread_t threads[THREADS];
    make_bundle();
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, open_and_close, NULL) == 0);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(logged("cuInit") == 1);
}
