/* What an op's tables and launch code see of the core, and what the core does for every op. */
#ifndef KSEAL_CORE_OP_H
#define KSEAL_CORE_OP_H

#include <stdbool.h>

#include "variant.h"

/* One axis of an op's config and the values it can have. */
struct kseal_axis {
    const char *name;
    const uint32_t *values;
    const char *const *names;
    uint32_t count;
};

struct kseal_axis_value {
    uint32_t axis;
    uint32_t value;
};

/* A combination that no variant has, of one class or (class_name null) of any, and why. */
struct kseal_exclude {
    const char *class_name;
    const struct kseal_axis_value *when;
    uint32_t count;
    const char *why;
};

struct kseal_op {
    const char *name;
    const struct kseal_axis *axes;
    uint32_t axis_count;
    const struct kseal_exclude *excludes;
    uint32_t exclude_count;
};

/* A prepared variant on one device. Does not change until it is released, so any thread may read it. */
struct kseal_handle {
    const struct kseal_variant *variant;
    CUkernel kernels[KSEAL_MAX_KERNELS];
    int device;
    CUcontext context; /* where it runs on a thread that has none: the one it was prepared in */
    bool retained;     /* context is the device's primary one and was retained for this handle */
    uint32_t sm_count;
};

/* The generated kseal_<op>_prepare and _release. */
kseal_status kseal_op_prepare(kseal_bundle *bundle, const struct kseal_op *op, int32_t device, void *stream,
                              const uint32_t *axes, struct kseal_handle **handle);
kseal_status kseal_op_release(struct kseal_handle *handle);

/* For launch code: fails with KSEAL_NOT_PREPARED where another device than the handle's is current. */
kseal_status kseal_handle_check_device(const struct kseal_handle *handle);

/*
 * For launch code: calls the variant's CuTe host function, which launches. `args` holds pointers to `count` arguments and
 * has room for one more, where the function returns its result.
 */
kseal_status kseal_handle_launch(const struct kseal_handle *handle, void **args, int32_t count);

/* One launch of a variant without a host function. */
struct kseal_launch {
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t kernel; /* of the variant's, 0 the first */
    uint32_t smem;   /* bytes of dynamic shared memory, no more than the kernel's; 0 for those */
    bool pdl; /* may begin while the kernel before it on the stream is ending */
    CUstream stream;
};

/* A TMA descriptor, as a kernel takes it. */
struct kseal_tensor_map {
    _Alignas(64) uint64_t words[16];
};

#define KSEAL_TILE_RANK 5

/* What a descriptor of a tiled tensor says. Dimensions go from the fastest; strides are in bytes, of the dimensions after it. */
struct kseal_tiles {
    int type; /* CU_TENSOR_MAP_DATA_TYPE_... */
    uint32_t rank;
    const void *address;
    uint64_t sizes[KSEAL_TILE_RANK];
    uint64_t strides[KSEAL_TILE_RANK - 1];
    uint32_t box[KSEAL_TILE_RANK];
    int swizzle; /* CU_TENSOR_MAP_SWIZZLE_... */
};

/* For launch code: makes the descriptor on the host. No context is needed, nothing is allocated. */
kseal_status kseal_encode_tiles(const struct kseal_tiles *tiles, struct kseal_tensor_map *map);

/* For launch code: launches a kernel of the variant. `params` points to each parameter, in order. */
kseal_status kseal_handle_launch_kernel(const struct kseal_handle *handle, const struct kseal_launch *launch, void **params);

#endif
