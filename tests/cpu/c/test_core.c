/* The parts: SHA-256, messages, reading of files and structs. */
#define _GNU_SOURCE
#include <dirent.h>

#include "error.h"
#include "fixture.h"
#include "image.h"
#include "sha256.h"

static void hashes_to(const void *data, size_t size, const char *wanted) {
    char hex[KSEAL_SHA256_HEX_SIZE];
    kseal_sha256_hex(data, size, hex);
    CHECK(strcmp(hex, wanted) == 0);
}

/* FIPS 180-4 examples and NIST's long vectors */
TEST(sha256_of_nothing) {
    hashes_to(NULL, 0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}
TEST(sha256_of_abc) { hashes_to("abc", 3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"); }
TEST(sha256_of_two_blocks) {
    hashes_to("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 56,
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}
TEST(sha256_of_a_million_a) {
    static char data[1000000];
    memset(data, 'a', sizeof data);
    hashes_to(data, sizeof data, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(a_message_that_is_too_long_is_cut_and_says_so) {
    static char text[2 * KSEAL_MESSAGE_SIZE];
    memset(text, 'x', sizeof text - 1);
    CHECK(kseal_fail(KSEAL_MALFORMED, "%s", text) == KSEAL_MALFORMED);
    CHECK(strlen(kseal_last_error()) == KSEAL_MESSAGE_SIZE - 1);
    CHECK(strcmp(kseal_last_error() + KSEAL_MESSAGE_SIZE - 4, "...") == 0);
}

/* A struct of three releases. */
struct grown {
    uint32_t struct_size, first;
    uint64_t second, third;
};
TEST(fields_that_an_older_caller_lacks_read_as_zero) {
    struct grown theirs = {.struct_size = 16, .first = 1, .second = 2, .third = 3}, ours = {9, 9, 9, 9};
    CHECK(kseal_read_struct(&ours, sizeof ours, 8, &theirs, "s") == KSEAL_OK);
    CHECK(ours.struct_size == 16 && ours.first == 1 && ours.second == 2 && ours.third == 0);
    theirs.struct_size = 8;
    CHECK(kseal_read_struct(&ours, sizeof ours, 8, &theirs, "s") == KSEAL_OK);
    CHECK(ours.first == 1 && ours.second == 0 && ours.third == 0);
}
TEST(fields_that_an_older_caller_lacks_are_not_written) {
    struct grown ours = {9, 1, 2, 3}, theirs = {.struct_size = 16, .third = 7};
    CHECK(kseal_write_struct(&theirs, 8, &ours, sizeof ours, "s") == KSEAL_OK);
    CHECK(theirs.struct_size == 16 && theirs.first == 1 && theirs.second == 2 && theirs.third == 7);
    theirs.struct_size = 7;
    REFUSES(KSEAL_ABI_MISMATCH, kseal_write_struct(&theirs, 8, &ours, sizeof ours, "s"), "s.struct_size is 7", "at least 8");
}

TEST(a_capture_on_a_stream_of_the_callers_is_seen) {
    CHECK(kseal_driver_open() == KSEAL_OK);
    fake_set_capturing_stream(at(0x1234));
    CHECK(kseal_driver_refuse_capture("op", NULL) == KSEAL_OK);
    CHECK(kseal_driver_refuse_capture("op", at(0x5678)) == KSEAL_OK);
    REFUSES(KSEAL_CAPTURING, kseal_driver_refuse_capture("op", at(0x1234)), "op: ", "captured into a graph");
}
TEST(a_capture_on_the_per_thread_default_stream_is_seen) {
    CHECK(kseal_driver_open() == KSEAL_OK);
    fake_set_capturing_stream(at(2));
    REFUSES(KSEAL_CAPTURING, kseal_driver_refuse_capture("op", NULL), "captured into a graph");
}

static int open_files(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder != NULL);
    while (readdir(folder) != NULL)
        count++;
    closedir(folder);
    return count;
}

#define PATH_REFUSED(sentence, path, status, ...)                                                                          \
    TEST(sentence) {                                                                                                       \
        void *data = NULL;                                                                                                 \
        make_bundle();                                                                                                     \
        int dirfd = open(bundle_path, O_RDONLY | O_DIRECTORY);                                                             \
        int before = open_files();                                                                                         \
        REFUSES(status, kseal_image_read(dirfd, path, 1, "", &data), __VA_ARGS__);                                         \
        CHECK(data == NULL && open_files() == before);                                                                     \
    }

#define LONG_NAME                                                                                                          \
    "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789"             \
    "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789"             \
    "01234567890123456789012345678901234567890123456789012345"

PATH_REFUSED(a_path_that_is_absolute, "/etc/passwd", KSEAL_MALFORMED, "component is empty")
PATH_REFUSED(a_path_with_two_slashes, "cubin//x", KSEAL_MALFORMED, "component is empty")
PATH_REFUSED(a_path_that_ends_in_a_slash, "cubin/", KSEAL_MALFORMED, "component is empty")
PATH_REFUSED(a_path_that_is_empty, "", KSEAL_MALFORMED, "component is empty")
PATH_REFUSED(a_path_with_too_long_a_name, "cubin/" LONG_NAME, KSEAL_MALFORMED, "too long")
PATH_REFUSED(a_path_below_a_file, "cubin/gdn_prefill/packed.cubin/x", KSEAL_MALFORMED, "not below folders")
PATH_REFUSED(a_path_below_nothing, "cubin/other/x", KSEAL_MISSING, "not in the bundle")
