/* Tests in C: TEST(sentence) { CHECK(...); } and one process for each, so that a sanitizer or a crash names its test. */
#ifndef TEST_HARNESS_H
#define TEST_HARNESS_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"

struct test {
    const char *name;
    void (*run)(void);
    struct test *next;
};
static struct test *tests;

#define TEST(test_name)                                                                                                    \
    static void test_name(void);                                                                                           \
    __attribute__((constructor)) static void register_##test_name(void) {                                                  \
        static struct test self = {#test_name, test_name, NULL};                                                           \
        self.next = tests;                                                                                                 \
        tests = &self;                                                                                                     \
    }                                                                                                                      \
    static void test_name(void)

#define CHECK(condition)                                                                                                   \
    do {                                                                                                                   \
        if (!(condition)) {                                                                                                \
            fprintf(stderr, "%s:%d: %s\n  last error: %s\n", __FILE__, __LINE__, #condition, kseal_last_error());          \
            exit(1);                                                                                                       \
        }                                                                                                                  \
    } while (0)

/* The call fails with `wanted` and its message has each of the texts. */
#define REFUSES(wanted, call, ...)                                                                                         \
    do {                                                                                                                   \
        kseal_status got_ = (call);                                                                                        \
        const char *texts_[] = {__VA_ARGS__};                                                                              \
        if (got_ != (wanted)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s gave %s, wanted %s\n  last error: %s\n", __FILE__, __LINE__, #call,                 \
                    kseal_status_name(got_), kseal_status_name(wanted), kseal_last_error());                               \
            exit(1);                                                                                                       \
        }                                                                                                                  \
        for (size_t i_ = 0; i_ < sizeof texts_ / sizeof *texts_; i_++)                                                     \
            if (strstr(kseal_last_error(), texts_[i_]) == NULL) {                                                          \
                fprintf(stderr, "%s:%d: no \"%s\" in: %s\n", __FILE__, __LINE__, texts_[i_], kseal_last_error());          \
                exit(1);                                                                                                   \
            }                                                                                                              \
    } while (0)

/* What malloc is in the sources under test: it can run out. */
static bool out_of_memory;
void *test_malloc(size_t size);
void *test_malloc(size_t size) { return out_of_memory ? NULL : calloc(1, size); }

int main(int argc, char **argv) {
    for (struct test *test = tests; test != NULL; test = test->next)
        if (argc == 2 && strcmp(argv[1], test->name) == 0) {
            test->run();
            return 0;
        }
    fprintf(stderr, "no test %s\n", argc == 2 ? argv[1] : "named");
    return 2;
}

#endif
