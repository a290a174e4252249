/* Opening, preparing and releasing: what is refused, and that a failure leaves nothing behind. */
#define _GNU_SOURCE
#include "fixture.h"

static kseal_bundle *bundle;
static handle_t *handle;

/* ---- open ---- */

TEST(versions_and_names_can_be_asked_without_a_bundle) {
    CHECK(kseal_abi_version() == KSEAL_ABI_VERSION);
    CHECK(strcmp(kseal_status_name(KSEAL_OK), "ok") == 0);
    CHECK(strcmp(kseal_status_name(KSEAL_PINS_DIFFER), "pins_differ") == 0);
    CHECK(strcmp(kseal_status_name(-1), "?") == 0);
    CHECK(strcmp(kseal_status_name(1000), "?") == 0);
    CHECK(strcmp(kseal_last_error(), "") == 0);
}

static const char *too_long(void) {
    static char path[300];
    memset(path, 'x', sizeof path - 1);
    return path;
}

#define OPEN_REFUSED(sentence, status, change, ...)                                                                        \
    TEST(sentence) {                                                                                                       \
        make_bundle();                                                                                                     \
        kseal_open_args a = open_args();                                                                                   \
        bundle = (kseal_bundle *)&a;                                                                                       \
        change;                                                                                                            \
        REFUSES(status, kseal_open(&a, &bundle), __VA_ARGS__);                                                             \
        CHECK(bundle == NULL);                                                                                             \
    }

OPEN_REFUSED(caller_of_another_major_version, KSEAL_ABI_MISMATCH, a.abi_version = 2 << 16, "2.0", "1.0")
OPEN_REFUSED(caller_of_a_later_minor_version, KSEAL_ABI_MISMATCH, a.abi_version = KSEAL_ABI_VERSION + 1, "1.1", "1.0")
OPEN_REFUSED(caller_without_a_version, KSEAL_ABI_MISMATCH, a.abi_version = 0, "0.0", "1.0")
OPEN_REFUSED(open_args_that_are_too_small, KSEAL_ABI_MISMATCH, a.struct_size = 8, "struct_size is 8", "at least 24")
OPEN_REFUSED(flags_that_nobody_knows, KSEAL_INVALID_ARGUMENT, a.flags = 6, "flags is 0x6")
OPEN_REFUSED(path_that_is_null, KSEAL_INVALID_ARGUMENT, a.bundle_path = NULL, "bundle_path is null")
OPEN_REFUSED(path_that_is_not_there, KSEAL_MISSING, a.bundle_path = "/nowhere/at/all", "/nowhere/at/all")
OPEN_REFUSED(path_to_a_file, KSEAL_MALFORMED, a.bundle_path = image_path("packed"), "not a folder")
OPEN_REFUSED(path_that_the_system_refuses, KSEAL_IO_ERROR, a.bundle_path = too_long(), "File name too long")
OPEN_REFUSED(no_memory_for_a_bundle, KSEAL_OUT_OF_MEMORY, out_of_memory = true, "no memory for a bundle")
OPEN_REFUSED(driver_that_does_not_start, KSEAL_DRIVER_ERROR, fake_fail("cuInit", 100, 0), "cuInit", "100")

TEST(path_to_a_symbolic_link) {
    char link[300];
    make_bundle();
    snprintf(link, sizeof link, "%s.link", bundle_path);
    CHECK(symlink(bundle_path, link) == 0);
    kseal_open_args a = open_args();
    a.bundle_path = link;
    REFUSES(KSEAL_MALFORMED, kseal_open(&a, &bundle), "symbolic link");
}
TEST(open_without_arguments_or_somewhere_to_put_the_bundle) {
    kseal_open_args a = open_args();
    REFUSES(KSEAL_INVALID_ARGUMENT, kseal_open(NULL, &bundle), "kseal_open_args is null");
    REFUSES(KSEAL_INVALID_ARGUMENT, kseal_open(&a, NULL), "bundle is null");
}
TEST(a_driver_that_starts_at_the_second_attempt_is_used) {
    make_bundle();
    kseal_open_args a = open_args();
    fake_fail("cuInit", 100, 0);
    REFUSES(KSEAL_DRIVER_ERROR, kseal_open(&a, &bundle), "cuInit");
    fake_fail("cuInit", 0, 0);
    CHECK(kseal_open(&a, &bundle) == KSEAL_OK);
    kseal_close(bundle);
    CHECK(logged("cuInit") == 1);
}
TEST(the_validation_flag_changes_nothing_for_a_normal_library) {
    make_bundle();
    kseal_open_args a = open_args();
    a.flags = KSEAL_OPEN_FLAG_VALIDATION;
    CHECK(kseal_open(&a, &bundle) == KSEAL_OK);
    kseal_close(bundle);
}
TEST(nothing_is_closed_and_released_without_complaint) {
    kseal_close(NULL);
    CHECK(kseal_gdn_prefill_release(NULL) == KSEAL_OK);
}

/* ---- variants ---- */

TEST(variants_are_described_in_a_fixed_order) {
    bundle = open_bundle();
    CHECK(kseal_variant_count(bundle) == 6);
    kseal_variant_info info = {.struct_size = sizeof info};
    CHECK(kseal_variant_at(bundle, 0, &info) == KSEAL_OK);
    CHECK(strcmp(info.op, "gdn_prefill") == 0 && strcmp(info.variant, "blackwell") == 0);
    CHECK(strcmp(info.sm, "sm_90a") == 0 && strcmp(info.class_name, "sm100") == 0);
    CHECK(strstr(info.axes, "state_dtype=bf16 state_layout=hvk") != NULL);
    CHECK(strlen(info.sha256) == 64 && info.size == strlen("image of blackwell, long enough to read"));
    CHECK(info.registers == 128 && info.spill_bytes == 8 && info.static_smem == 16 && info.dynamic_smem == 1000);
    CHECK(info.evidence == KSEAL_EVIDENCE_GLUE && info.struct_size == sizeof info);
    kseal_close(bundle);
}
TEST(a_variant_beyond_the_last) {
    bundle = open_bundle();
    kseal_variant_info info = {.struct_size = sizeof info};
    REFUSES(KSEAL_INVALID_ARGUMENT, kseal_variant_at(bundle, 6, &info), "index is 6", "6 variants");
}
TEST(a_variant_without_a_bundle_or_somewhere_to_put_it) {
    bundle = open_bundle();
    kseal_variant_info info = {.struct_size = 4};
    REFUSES(KSEAL_INVALID_ARGUMENT, kseal_variant_at(NULL, 0, &info), "bundle is null");
    REFUSES(KSEAL_INVALID_ARGUMENT, kseal_variant_at(bundle, 0, NULL), "info is null");
    REFUSES(KSEAL_ABI_MISMATCH, kseal_variant_at(bundle, 0, &info), "struct_size is 4");
}

/* ---- prepare: the config ---- */

#define PREPARE_REFUSED(sentence, variant, status, change, ...)                                                            \
    TEST(sentence) {                                                                                                       \
        bundle = open_bundle();                                                                                            \
        config_t c = config_of(variant);                                                                                   \
        handle = (handle_t *)&c;                                                                                           \
        change;                                                                                                            \
        REFUSES(status, kseal_gdn_prefill_prepare(bundle, &c, &handle), __VA_ARGS__);                                      \
        CHECK(handle == NULL);                                                                                             \
        CHECK(logged("load") == logged("unload"));                                                                         \
        CHECK(logged("cuDevicePrimaryCtxRetain") == logged("cuDevicePrimaryCtxRelease"));                                  \
        kseal_close(bundle);                                                                                               \
    }

PREPARE_REFUSED(element_type_that_the_op_does_not_have, "packed", KSEAL_INVALID_ARGUMENT, c.dtype = KSEAL_DTYPE_F32,
                "config.dtype is 3", "bf16 (1) or f16 (2)")
PREPARE_REFUSED(state_layout_left_zero, "packed", KSEAL_INVALID_ARGUMENT, c.state_layout = 0, "config.state_layout is 0",
                "hvk (1) or hkv (2)")
PREPARE_REFUSED(boolean_that_is_neither_0_nor_1, "packed", KSEAL_INVALID_ARGUMENT, c.beta = 2, "config.beta is 2", "it must be 0 or 1")
PREPARE_REFUSED(config_that_no_variant_here_has, "packed", KSEAL_UNSUPPORTED, c.dtype = KSEAL_DTYPE_F16, "dtype=f16",
                "packed, plain, pooled, pooled_ckpt", "sm_90a")
PREPARE_REFUSED(config_that_no_class_has_with_its_reason, "pooled", KSEAL_UNSUPPORTED, c.initial_state = 0, "initial_state=0",
                "a pool is read by its rows")
PREPARE_REFUSED(config_that_one_class_here_lacks_with_its_reason, "blackwell", KSEAL_UNSUPPORTED, c.alpha = 0,
                "the Blackwell class reads alpha")
PREPARE_REFUSED(no_memory_for_a_handle, "packed", KSEAL_OUT_OF_MEMORY, out_of_memory = true, "gdn_prefill: no memory for a handle")
PREPARE_REFUSED(config_that_is_too_small, "packed", KSEAL_ABI_MISMATCH, c.struct_size = 8, "kseal_gdn_prefill_config")

TEST(prepare_without_bundle_config_or_somewhere_to_put_the_handle) {
    bundle = open_bundle();
    config_t c = config_of("packed");
    REFUSES(KSEAL_INVALID_ARGUMENT, kseal_gdn_prefill_prepare(NULL, &c, &handle), "bundle is null");
    REFUSES(KSEAL_INVALID_ARGUMENT, kseal_gdn_prefill_prepare(bundle, NULL, &handle), "config is null");
    REFUSES(KSEAL_INVALID_ARGUMENT, kseal_gdn_prefill_prepare(bundle, &c, NULL), "handle is null");
}

/* ---- prepare: the device ---- */

PREPARE_REFUSED(device_of_another_sm, "packed", KSEAL_WRONG_SM, fake_set_device(1, 12, 0, 188), "sm_120", "sm_90a")
PREPARE_REFUSED(device_of_another_minor_version, "packed", KSEAL_WRONG_SM, fake_set_device(1, 9, 1, 132), "sm_91", "sm_90a")
PREPARE_REFUSED(device_that_is_not_there, "packed", KSEAL_INVALID_ARGUMENT, c.device = 1, "config.device is 1", "1 devices")
PREPARE_REFUSED(device_below_minus_one, "packed", KSEAL_INVALID_ARGUMENT, c.device = -2, "config.device is -2")
PREPARE_REFUSED(current_device_without_a_context, "packed", KSEAL_DRIVER_ERROR, fake_set_current(-1), "config.device is -1", "201")
PREPARE_REFUSED(device_beyond_what_is_counted, "packed", KSEAL_UNSUPPORTED, (fake_set_device(80, 9, 0, 132), c.device = 64),
                "device is 64", "63")

/* ---- prepare: capture ---- */

PREPARE_REFUSED(prepare_while_a_stream_is_captured, "packed", KSEAL_CAPTURING, fake_set_capturing(1), "captured into a graph")
PREPARE_REFUSED(prepare_while_another_blocking_stream_is_captured, "packed", KSEAL_CAPTURING,
                fake_fail("cuStreamIsCapturing", 906, 0), "captured into a graph")
PREPARE_REFUSED(prepare_that_the_driver_refuses_because_of_a_capture, "packed", KSEAL_CAPTURING,
                fake_fail("cuLibraryLoadData", 900, 0), "cuLibraryLoadData", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
PREPARE_REFUSED(capture_query_that_fails, "packed", KSEAL_DRIVER_ERROR, fake_fail("cuStreamIsCapturing", 1, 0),
                "cuStreamIsCapturing")

/* ---- prepare: the driver fails half-way ---- */

PREPARE_REFUSED(load_that_fails, "packed", KSEAL_DRIVER_ERROR, fake_fail("cuLibraryLoadData", 209, 0), "cuLibraryLoadData",
                "CUDA_ERROR_NO_BINARY_FOR_GPU", "209", "no kernel image")
PREPARE_REFUSED(kernel_that_is_not_found, "packed", KSEAL_DRIVER_ERROR, fake_fail("cuLibraryGetKernel", 500, 0),
                "cuLibraryGetKernel", "500")
PREPARE_REFUSED(device_attribute_that_fails, "packed", KSEAL_DRIVER_ERROR, fake_fail("cuDeviceGetAttribute", 1, 3),
                "cuDeviceGetAttribute")
PREPARE_REFUSED(kernel_attribute_that_cannot_be_read, "packed", KSEAL_DRIVER_ERROR, fake_fail("cuKernelGetAttribute", 1, 0),
                "cuKernelGetAttribute")
PREPARE_REFUSED(kernel_attribute_that_cannot_be_set, "packed", KSEAL_DRIVER_ERROR, fake_fail("cuKernelSetAttribute", 1, 0),
                "cuKernelSetAttribute")
PREPARE_REFUSED(function_that_does_not_load, "packed", KSEAL_DRIVER_ERROR, fake_fail("cuKernelGetFunction", 2, 0),
                "cuKernelGetFunction")
PREPARE_REFUSED(primary_context_that_is_not_given, "packed", KSEAL_DRIVER_ERROR,
                (fake_set_device(2, 9, 0, 132), c.device = 1, fake_fail("cuDevicePrimaryCtxRetain", 2, 0)),
                "cuDevicePrimaryCtxRetain")
PREPARE_REFUSED(primary_context_that_does_not_become_current, "packed", KSEAL_DRIVER_ERROR,
                (fake_set_device(2, 9, 0, 132), c.device = 1, fake_fail("cuCtxPushCurrent", 2, 0)), "cuCtxPushCurrent")
PREPARE_REFUSED(function_that_does_not_load_in_another_context, "packed", KSEAL_DRIVER_ERROR,
                (fake_set_device(2, 9, 0, 132), c.device = 1, fake_fail("cuKernelGetFunction", 2, 0)), "cuKernelGetFunction")

/* ---- prepare: the image ---- */

static void swap_images(const char *one, const char *two) {
    char from[512];
    snprintf(from, sizeof from, "%s", image_path(two));
    CHECK(rename(from, image_path(one)) == 0);
}

static void overwrite(const char *variant, const char *text) { write_file(image_path(variant), text); }

PREPARE_REFUSED(image_that_is_missing, "packed", KSEAL_MISSING, unlink(image_path("packed")), "packed.cubin", "not in the bundle")
PREPARE_REFUSED(image_with_one_other_byte, "packed", KSEAL_MISMATCH, overwrite("packed", "image of packed, long enough to reaD"),
                "packed.cubin", "SHA-256")
PREPARE_REFUSED(image_that_is_shorter, "packed", KSEAL_MISMATCH, overwrite("packed", "image"), "5 bytes", "36 were pinned")
PREPARE_REFUSED(image_that_is_longer, "packed", KSEAL_MISMATCH, overwrite("packed", "image of packed, long enough to read again"),
                "bytes")
PREPARE_REFUSED(image_of_another_variant, "packed", KSEAL_MISMATCH, swap_images("packed", "pooled"), "pinned")
PREPARE_REFUSED(image_that_may_not_be_read, "packed", KSEAL_IO_ERROR,
                (chmod(image_path("packed"), 0), geteuid() == 0 ? seteuid(65534) : 0), "packed.cubin")

static void replace_by_link(void) {
    char to[512];
    snprintf(to, sizeof to, "%s", image_path("packed"));
    strcat(to, ".real");
    CHECK(rename(image_path("packed"), to) == 0);
    CHECK(symlink(to, image_path("packed")) == 0);
}
PREPARE_REFUSED(image_that_is_a_symbolic_link, "packed", KSEAL_MALFORMED, replace_by_link(), "symbolic link")

static void replace_folder_by_link(void) {
    char from[400], to[400];
    snprintf(from, sizeof from, "%s/cubin", bundle_path);
    snprintf(to, sizeof to, "%s/elsewhere", bundle_path);
    CHECK(rename(from, to) == 0);
    CHECK(symlink("elsewhere", from) == 0);
}
PREPARE_REFUSED(image_below_a_symbolic_link, "packed", KSEAL_MALFORMED, replace_folder_by_link(), "symbolic link")

static void replace_by_fifo(void) {
    CHECK(unlink(image_path("packed")) == 0);
    CHECK(mkfifo(image_path("packed"), 0600) == 0);
}
PREPARE_REFUSED(image_that_is_a_fifo_and_would_wait_for_ever, "packed", KSEAL_MALFORMED, replace_by_fifo(), "regular file")

static void replace_by_folder(void) {
    CHECK(unlink(image_path("packed")) == 0);
    CHECK(mkdir(image_path("packed"), 0700) == 0);
}
PREPARE_REFUSED(image_that_is_a_folder, "packed", KSEAL_MALFORMED, replace_by_folder(), "regular file")

TEST(an_image_swapped_while_another_handle_lives_is_refused_all_the_same) {
    bundle = open_bundle();
    handle_t *first = prepare(bundle, "packed");
    config_t c = config_of("packed");
    overwrite("packed", "image of packed, long enough to reaD");
    REFUSES(KSEAL_MISMATCH, kseal_gdn_prefill_prepare(bundle, &c, &handle), "SHA-256");
    args_t a = args_of("packed");
    CHECK(kseal_gdn_prefill_run(first, &a) == KSEAL_OK);
    CHECK(kseal_gdn_prefill_release(first) == KSEAL_OK);
    CHECK(logged("unload") == 1);
    kseal_close(bundle);
}
TEST(the_bundle_stays_what_was_opened_when_its_path_is_renamed) {
    char elsewhere[300];
    bundle = open_bundle();
    snprintf(elsewhere, sizeof elsewhere, "%s.moved", bundle_path);
    CHECK(rename(bundle_path, elsewhere) == 0);
    CHECK(kseal_gdn_prefill_release(prepare(bundle, "packed")) == KSEAL_OK);
    kseal_close(bundle);
}
TEST(the_image_that_loads_is_the_bundles_and_not_the_embedded_one) {
    bundle = open_bundle();
    handle = prepare(bundle, "packed");
    CHECK(strstr(fake_log(), "\"image\": \"696d616765206f66207061636b65642c\"") != NULL); /* image of packed, */
    CHECK(logged("load") == 1);
    CHECK(kseal_gdn_prefill_release(handle) == KSEAL_OK);
    kseal_close(bundle);
}

TEST(every_kernel_of_a_variant_is_put_into_the_context) {
    bundle = open_bundle();
    handle = prepare(bundle, "pooled_ckpt");
    CHECK(logged("cuKernelGetFunction") == 2);
    CHECK(strstr(fake_log(), "\"cuKernelGetFunction\", \"kernel\": \"stub\"") != NULL);
    CHECK(strstr(fake_log(), "\"cuKernelGetFunction\", \"kernel\": \"second\"") != NULL);
    CHECK(kseal_gdn_prefill_release(handle) == KSEAL_OK);
    kseal_close(bundle);
}
PREPARE_REFUSED(host_object_that_leaves_a_kernel_out, "pooled_ckpt", KSEAL_MALFORMED, stub_mode = STUB_LOAD_ONE, "pooled_ckpt",
                "did not load second")

/* ---- sharing ---- */

TEST(the_same_variant_twice_is_loaded_once_and_unloaded_last) {
    bundle = open_bundle();
    handle_t *one = prepare(bundle, "packed"), *two = prepare(bundle, "packed");
    CHECK(one != two && logged("load") == 1 && logged("cuKernelGetFunction") == 1);
    CHECK(kseal_gdn_prefill_release(one) == KSEAL_OK);
    CHECK(logged("unload") == 0);
    args_t a = args_of("packed");
    CHECK(kseal_gdn_prefill_run(two, &a) == KSEAL_OK);
    CHECK(kseal_gdn_prefill_release(two) == KSEAL_OK);
    CHECK(logged("unload") == 1);
    kseal_close(bundle);
}
TEST(a_variant_can_be_prepared_again_after_it_was_unloaded) {
    bundle = open_bundle();
    for (int i = 1; i <= 3; i++) {
        handle = prepare(bundle, "packed");
        args_t a = args_of("packed");
        CHECK(kseal_gdn_prefill_run(handle, &a) == KSEAL_OK);
        CHECK(kseal_gdn_prefill_release(handle) == KSEAL_OK);
        CHECK(logged("load") == i && logged("unload") == i);
    }
    kseal_close(bundle);
}
TEST(two_devices_share_one_load_and_each_handle_runs_on_its_own) {
    fake_set_device(2, 9, 0, 132);
    bundle = open_bundle();
    config_t c = config_of("packed");
    handle_t *other;
    handle = prepare(bundle, "packed");
    c.device = 1;
    CHECK(kseal_gdn_prefill_prepare(bundle, &c, &other) == KSEAL_OK);
    CHECK(logged("load") == 1 && logged("cuKernelGetFunction") == 2 && logged("cuDevicePrimaryCtxRetain") == 2);
    args_t a = args_of("packed");
    CHECK(kseal_gdn_prefill_run(handle, &a) == KSEAL_OK);
    REFUSES(KSEAL_NOT_PREPARED, kseal_gdn_prefill_run(other, &a), "device 0 is current", "device 1");
    fake_set_current(1);
    CHECK(kseal_gdn_prefill_run(other, &a) == KSEAL_OK);
    CHECK(kseal_gdn_prefill_release(other) == KSEAL_OK);
    CHECK(kseal_gdn_prefill_release(handle) == KSEAL_OK);
    CHECK(logged("unload") == 1 && logged("cuDevicePrimaryCtxRelease") == 2);
    kseal_close(bundle);
}
TEST(a_second_device_that_fails_leaves_the_first_as_it_was) {
    fake_set_device(2, 9, 0, 132);
    bundle = open_bundle();
    config_t c = config_of("packed");
    handle_t *other;
    handle = prepare(bundle, "packed");
    c.device = 1;
    fake_fail("cuKernelSetAttribute", 1, 0);
    REFUSES(KSEAL_DRIVER_ERROR, kseal_gdn_prefill_prepare(bundle, &c, &other), "cuKernelSetAttribute");
    fake_fail("cuKernelSetAttribute", 0, 0);
    args_t a = args_of("packed");
    CHECK(logged("unload") == 0);
    CHECK(kseal_gdn_prefill_run(handle, &a) == KSEAL_OK);
    CHECK(kseal_gdn_prefill_prepare(bundle, &c, &other) == KSEAL_OK);
    CHECK(kseal_gdn_prefill_release(other) == KSEAL_OK);
    CHECK(kseal_gdn_prefill_release(handle) == KSEAL_OK);
    kseal_close(bundle);
}
TEST(a_handle_outlives_its_bundle) {
    bundle = open_bundle();
    handle = prepare(bundle, "packed");
    kseal_close(bundle);
    args_t a = args_of("packed");
    CHECK(kseal_gdn_prefill_run(handle, &a) == KSEAL_OK);
    CHECK(kseal_gdn_prefill_release(handle) == KSEAL_OK);
}
TEST(an_unload_that_fails_is_told_and_does_not_keep_the_handle) {
    bundle = open_bundle();
    handle = prepare(bundle, "packed");
    fake_fail("cuLibraryUnload", 4, 0);
    REFUSES(KSEAL_DRIVER_ERROR, kseal_gdn_prefill_release(handle), "cuLibraryUnload", "4");
    fake_fail("cuLibraryUnload", 0, 0);
    CHECK(kseal_gdn_prefill_release(prepare(bundle, "packed")) == KSEAL_OK);
    kseal_close(bundle);
}
TEST(a_run_loads_allocates_and_waits_for_nothing) {
    bundle = open_bundle();
    handle = prepare(bundle, "packed");
    fake_reset();
    args_t a = args_of("packed");
    CHECK(kseal_gdn_prefill_run(handle, &a) == KSEAL_OK);
    const char *log = fake_log();
    CHECK(strchr(log, '\n') == log + strlen(log) - 1); /* one call: the launch */
    CHECK(logged("launch") == 1);
}
