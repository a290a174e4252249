#include "op.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bundle.h"
#include "cute.h"

/* Text that grows to a fixed size and is cut there; half the message, which says more around it. */
struct text {
    char bytes[KSEAL_MESSAGE_SIZE / 2];
    size_t length;
};

static void append(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void append(struct text *text, const char *format, ...) {
    va_list args;
    size_t room = sizeof text->bytes - text->length;
    va_start(args, format);
    int length = vsnprintf(text->bytes + text->length, room, format, args);
    va_end(args);
    text->length += length < (int)room ? (size_t)length : room - 1;
}

static const char *value_name(const struct kseal_axis *axis, uint32_t value) {
    for (uint32_t i = 0; i < axis->count; i++)
        if (axis->values[i] == value)
            return axis->names[i];
    return NULL;
}

/* A name and its number; once, where the name is the number. */
static void append_value(struct text *text, const char *separator, const char *name, uint32_t value) {
    char digits[16];
    snprintf(digits, sizeof digits, "%u", value);
    if (strcmp(digits, name) == 0)
        append(text, "%s%s", separator, name);
    else
        append(text, "%s%s (%u)", separator, name, value);
}

static kseal_status check_axes(const struct kseal_op *op, const uint32_t *axes) {
    for (uint32_t a = 0; a < op->axis_count; a++) {
        const struct kseal_axis *axis = &op->axes[a];
        struct text allowed = {.length = 0};
        if (value_name(axis, axes[a]) != NULL)
            continue;
        for (uint32_t i = 0; i < axis->count; i++)
            append_value(&allowed, i == 0 ? "" : " or ", axis->names[i], axis->values[i]);
        return kseal_fail(KSEAL_INVALID_ARGUMENT, "%s: config.%s is %u; it must be %s", op->name, axis->name, axes[a],
                          allowed.bytes);
    }
    return KSEAL_OK;
}

static const struct kseal_variant *find_variant(const struct kseal_op *op, const uint32_t *axes) {
    for (const struct kseal_variant *v = kseal_variants; v->op != NULL; v++)
        if (strcmp(v->op, op->name) == 0 && memcmp(v->axes, axes, op->axis_count * sizeof *axes) == 0)
            return v;
    return NULL;
}

static bool has_class(const struct kseal_op *op, const char *class_name) {
    for (const struct kseal_variant *v = kseal_variants; v->op != NULL; v++)
        if (strcmp(v->op, op->name) == 0 && strcmp(v->class_name, class_name) == 0)
            return true;
    return false;
}

/* Why no build has these axes, or null where it is just not in this one. */
static const char *excluded_because(const struct kseal_op *op, const uint32_t *axes) {
    for (uint32_t e = 0; e < op->exclude_count; e++) {
        const struct kseal_exclude *exclude = &op->excludes[e];
        bool applies = exclude->class_name == NULL || has_class(op, exclude->class_name);
        for (uint32_t i = 0; i < exclude->count; i++)
            applies = applies && axes[exclude->when[i].axis] == exclude->when[i].value;
        if (applies)
            return exclude->why;
    }
    return NULL;
}

static kseal_status fail_unsupported(const struct kseal_op *op, const uint32_t *axes) {
    struct text asked = {.length = 0}, there = {.length = 0};
    const char *why = excluded_because(op, axes);
    for (uint32_t a = 0; a < op->axis_count; a++)
        append(&asked, " %s=%s", op->axes[a].name, value_name(&op->axes[a], axes[a]));
    for (const struct kseal_variant *v = kseal_variants; v->op != NULL; v++)
        if (strcmp(v->op, op->name) == 0)
            append(&there, "%s%s", there.length == 0 ? "" : ", ", v->name);
    return kseal_fail(KSEAL_UNSUPPORTED, "%s: no variant for%s%s%s; this bundle (%s) has: %s", op->name, asked.bytes,
                      why != NULL ? "; " : "", why != NULL ? why : "", kseal_library_sm,
                      there.length == 0 ? "none" : there.bytes);
}

static kseal_status attribute(int *value, int which, int device) {
    CUresult code = kseal_driver.cuDeviceGetAttribute(value, which, device);
    return code == 0 ? KSEAL_OK : kseal_driver_fail("cuDeviceGetAttribute", code);
}

static kseal_status resolve_device(const struct kseal_op *op, int32_t asked, int *device) {
    int count;
    CUresult code;
    if (asked == -1) {
        code = kseal_driver_current_device(device);
        return code == 0 ? KSEAL_OK : kseal_driver_fail("config.device is -1: cuCtxGetDevice", code);
    }
    code = kseal_driver.cuDeviceGetCount(&count);
    if (code != 0)
        return kseal_driver_fail("cuDeviceGetCount", code);
    if (asked < -1 || asked >= count)
        return kseal_fail(KSEAL_INVALID_ARGUMENT, "%s: config.device is %d; there are %d devices, and -1 is the current one",
                          op->name, asked, count);
    *device = asked;
    return KSEAL_OK;
}

static kseal_status check_device(const struct kseal_op *op, int device, uint32_t *sm_count) {
    int major, minor, count;
    kseal_status status = attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
    if (status == KSEAL_OK)
        status = attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
    if (status == KSEAL_OK)
        status = attribute(&count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    if (status != KSEAL_OK)
        return status;
    if ((uint32_t)major != kseal_library_cc[0] || (uint32_t)minor != kseal_library_cc[1])
        return kseal_fail(KSEAL_WRONG_SM, "%s: device %d is sm_%d%d; this bundle is for %s", op->name, device, major, minor,
                          kseal_library_sm);
    if (device >= KSEAL_MAX_DEVICES)
        return kseal_fail(KSEAL_UNSUPPORTED, "%s: device is %d; at most %d is supported", op->name, device,
                          KSEAL_MAX_DEVICES - 1);
    *sm_count = (uint32_t)count;
    return KSEAL_OK;
}

/* The context that runs take where the thread has none. The primary one is made only if the caller works in no other. */
static kseal_status remember_context(struct kseal_handle *handle) {
    CUdevice current;
    CUresult code;
    handle->retained = kseal_driver_current_device(&current) != 0 || current != handle->device;
    if (!handle->retained) {
        code = kseal_driver.cuCtxGetCurrent(&handle->context);
        return code == 0 ? KSEAL_OK : kseal_driver_fail("cuCtxGetCurrent", code);
    }
    code = kseal_driver.cuDevicePrimaryCtxRetain(&handle->context, handle->device);
    return code == 0 ? KSEAL_OK : kseal_driver_fail("cuDevicePrimaryCtxRetain", code);
}

static kseal_status prepare(const kseal_bundle *bundle, const struct kseal_op *op, int32_t device, void *stream,
                            const uint32_t *axes, struct kseal_handle *handle) {
    kseal_status status = check_axes(op, axes);
    if (status != KSEAL_OK)
        return status;
    handle->variant = find_variant(op, axes);
    if (handle->variant == NULL)
        return fail_unsupported(op, axes);
    status = resolve_device(op, device, &handle->device);
    if (status == KSEAL_OK)
        status = check_device(op, handle->device, &handle->sm_count);
    if (status == KSEAL_OK)
        status = kseal_driver_refuse_capture(op->name, stream);
    if (status == KSEAL_OK)
        status = kseal_variant_acquire(handle->variant, bundle->dirfd, handle->device, handle->kernels);
    if (status != KSEAL_OK)
        return status;
    status = remember_context(handle);
    if (status != KSEAL_OK)
        kseal_variant_release(handle->variant);
    return status;
}

kseal_status kseal_op_prepare(kseal_bundle *bundle, const struct kseal_op *op, int32_t device, void *stream,
                              const uint32_t *axes, struct kseal_handle **handle) {
    if (bundle == NULL)
        return kseal_fail(KSEAL_INVALID_ARGUMENT, "%s: bundle is null", op->name);
    struct kseal_handle *prepared = malloc(sizeof *prepared);
    if (prepared == NULL)
        return kseal_fail(KSEAL_OUT_OF_MEMORY, "%s: no memory for a handle", op->name);
    kseal_status status = prepare(bundle, op, device, stream, axes, prepared);
    if (status != KSEAL_OK) {
        free(prepared);
        return status;
    }
    *handle = prepared;
    return KSEAL_OK;
}

kseal_status kseal_op_release(struct kseal_handle *handle) {
    if (handle == NULL)
        return KSEAL_OK;
    kseal_status status = kseal_variant_release(handle->variant);
    if (handle->retained)
        kseal_driver.cuDevicePrimaryCtxRelease_v2(handle->device);
    free(handle);
    return status;
}

kseal_status kseal_handle_check_device(const struct kseal_handle *handle) {
    CUdevice device;
    CUresult code = kseal_driver_current_device(&device);
    if (code == CUDA_ERROR_INVALID_CONTEXT)
        return KSEAL_OK; /* no context: the launch takes the handle's */
    if (code != 0)
        return kseal_driver_fail("cuCtxGetDevice", code);
    if (device != handle->device)
        return kseal_fail(KSEAL_NOT_PREPARED, "%s: device %d is current; this handle was prepared for device %d",
                          handle->variant->op, device, handle->device);
    return KSEAL_OK;
}

/* Gives a thread that has not used CUDA yet a context, as the runtime API would now; undone by leave_context. */
static kseal_status enter_context(const struct kseal_handle *handle, bool *entered) {
    CUcontext current;
    *entered = false;
    CUresult code = kseal_driver.cuCtxGetCurrent(&current);
    if (code != 0)
        return kseal_driver_fail("cuCtxGetCurrent", code);
    if (current != NULL)
        return KSEAL_OK;
    code = kseal_driver.cuCtxPushCurrent_v2(handle->context);
    if (code != 0)
        return kseal_driver_fail("cuCtxPushCurrent", code);
    *entered = true;
    return KSEAL_OK;
}

static void leave_context(bool entered) {
    CUcontext popped;
    if (entered)
        kseal_driver.cuCtxPopCurrent_v2(&popped);
}

kseal_status kseal_handle_launch(const struct kseal_handle *handle, void **args, int32_t count) {
    bool entered;
    kseal_status status = enter_context(handle, &entered);
    if (status != KSEAL_OK)
        return status;
    status = kseal_cute_call(handle->variant, args, count);
    leave_context(entered);
    return status;
}

kseal_status kseal_encode_tiles(const struct kseal_tiles *tiles, struct kseal_tensor_map *map) {
    static const uint32_t dense[KSEAL_TILE_RANK] = {1, 1, 1, 1, 1};
    CUresult code = kseal_driver.cuTensorMapEncodeTiled(map, tiles->type, tiles->rank, (void *)(uintptr_t)tiles->address,
                                                        tiles->sizes, tiles->strides, tiles->box, dense, 0, tiles->swizzle, 0, 0);
    return code == 0 ? KSEAL_OK : kseal_driver_fail("cuTensorMapEncodeTiled", code);
}

kseal_status kseal_handle_launch_kernel(const struct kseal_handle *handle, const struct kseal_launch *launch, void **params) {
    CUlaunchAttribute pdl = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, .value = {launch->pdl}};
    CUlaunchConfig config = {
        .grid = {launch->grid[0], launch->grid[1], launch->grid[2]},
        .block = {launch->block[0], launch->block[1], launch->block[2]},
        .dynamic_smem = launch->smem != 0 ? launch->smem : handle->variant->kernels[launch->kernel].dynamic_smem,
        .stream = launch->stream,
        .attributes = &pdl,
        .attribute_count = 1,
    };
    bool entered;
    kseal_status status = enter_context(handle, &entered);
    if (status != KSEAL_OK)
        return status;
    /* The driver takes a kernel where it takes a function. */
    CUresult code = kseal_driver.cuLaunchKernelEx(&config, (CUfunction)(void *)handle->kernels[launch->kernel], params, NULL);
    if (code != 0)
        status = kseal_driver_fail("cuLaunchKernelEx", code);
    leave_context(entered);
    return status;
}
