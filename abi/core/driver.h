/* The few CUDA driver functions that the library calls, found at run time. No CUDA header is needed to build. */
#ifndef KSEAL_CORE_DRIVER_H
#define KSEAL_CORE_DRIVER_H

#include <stddef.h>

#include "error.h"

typedef int CUresult;
typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUlib_st *CUlibrary;
typedef struct CUkern_st *CUkernel;
typedef struct CUfunc_st *CUfunction;

typedef struct CUlaunchAttribute {
    uint32_t id;
    uint32_t pad;
    uint64_t value[8];
} CUlaunchAttribute;

typedef struct CUlaunchConfig {
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t dynamic_smem;
    CUstream stream;
    CUlaunchAttribute *attributes;
    uint32_t attribute_count;
} CUlaunchConfig;

/* Numbers of cuda.h. */
enum {
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9,
    CU_TENSOR_MAP_SWIZZLE_64B = 2,
    CU_TENSOR_MAP_SWIZZLE_128B = 3,
};
#define CU_STREAM_LEGACY ((CUstream)(uintptr_t)1)
#define CU_STREAM_PER_THREAD ((CUstream)(uintptr_t)2)

/* return type, name, parameters; `name` is also the exported symbol unless a version suffix is part of it */
#define KSEAL_DRIVER_FUNCTIONS(F)                                                                                          \
    F(cuInit, (unsigned flags))                                                                                            \
    F(cuDeviceGetCount, (int *count))                                                                                      \
    F(cuDeviceGetAttribute, (int *value, int attribute, CUdevice device))                                                  \
    F(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))                                                    \
    F(cuDevicePrimaryCtxRelease_v2, (CUdevice device))                                                                     \
    F(cuCtxGetDevice, (CUdevice * device))                                                                                 \
    F(cuCtxGetCurrent, (CUcontext * context))                                                                              \
    F(cuCtxPushCurrent_v2, (CUcontext context))                                                                            \
    F(cuCtxPopCurrent_v2, (CUcontext * context))                                                                           \
    F(cuGetErrorName, (CUresult code, const char **name))                                                                  \
    F(cuGetErrorString, (CUresult code, const char **text))                                                                \
    F(cuStreamIsCapturing, (CUstream stream, int *status))                                                                 \
    F(cuLibraryLoadData, (CUlibrary * library, const void *code, void *jit_options, void *jit_values, unsigned jit_count,  \
                          void *library_options, void *library_values, unsigned library_count))                            \
    F(cuLibraryUnload, (CUlibrary library))                                                                                \
    F(cuLibraryGetKernel, (CUkernel * kernel, CUlibrary library, const char *name))                                        \
    F(cuKernelGetFunction, (CUfunction * function, CUkernel kernel))                                                       \
    F(cuKernelGetAttribute, (int *value, int attribute, CUkernel kernel, CUdevice device))                                 \
    F(cuKernelSetAttribute, (int attribute, int value, CUkernel kernel, CUdevice device))                                  \
    F(cuLaunchKernelEx, (const CUlaunchConfig *config, CUfunction function, void **params, void **extra))                  \
    F(cuTensorMapEncodeTiled, (void *map, int type, uint32_t rank, void *address, const uint64_t *sizes,                   \
                               const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides,              \
                               int interleave, int swizzle, int promotion, int fill))

struct kseal_driver {
#define KSEAL_DRIVER_MEMBER(name, params) CUresult(*name) params;
    KSEAL_DRIVER_FUNCTIONS(KSEAL_DRIVER_MEMBER)
#undef KSEAL_DRIVER_MEMBER
};

/* Filled by the first successful kseal_driver_open and constant from then on. */
extern struct kseal_driver kseal_driver;

/* Loads libcuda.so.1, finds every function and calls cuInit; does nothing when that has been done. Any thread. */
kseal_status kseal_driver_open(void);

/* The status and message for a driver call that returned `code`. */
kseal_status kseal_driver_fail(const char *call, CUresult code);

/*
 * Device of the current context; CUDA_ERROR_INVALID_CONTEXT where there is none, found without a driver call that fails
 * (which debuggers and sanitizers would report).
 */
CUresult kseal_driver_current_device(CUdevice *device);

/*
 * Fails with KSEAL_CAPTURING where the driver says that `stream`, or a blocking stream of the current context, is being
 * captured. Asking breaks no capture; a capture on some other non-blocking stream cannot be seen without breaking it.
 */
kseal_status kseal_driver_refuse_capture(const char *what, CUstream stream);

#endif
