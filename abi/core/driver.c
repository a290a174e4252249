#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#define DRIVER_LIBRARY "libcuda.so.1"

struct kseal_driver kseal_driver;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static bool ready;

/* ISO C has no cast from object to function pointer; POSIX promises that the bytes mean the same. */
static bool find(void *library, const char *name, void *slot) {
    void *symbol = dlsym(library, name);
    memcpy(slot, &symbol, sizeof symbol);
    return symbol != NULL;
}

static kseal_status fill(struct kseal_driver *table) {
    void *library = dlopen(DRIVER_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *why = dlerror();
        return kseal_fail(KSEAL_NO_DRIVER, "%s", why != NULL ? why : DRIVER_LIBRARY " did not load");
    }
#define FIND(name, params)                                                                                                 \
    if (!find(library, #name, &table->name)) {                                                                             \
        dlclose(library);                                                                                                  \
        return kseal_fail(KSEAL_NO_DRIVER, DRIVER_LIBRARY " has no " #name "; a newer driver is needed");                  \
    }
    KSEAL_DRIVER_FUNCTIONS(FIND)
#undef FIND
    return KSEAL_OK;
}

static kseal_status open_locked(void) {
    struct kseal_driver table;
    kseal_status status = fill(&table);
    if (status != KSEAL_OK)
        return status;
    CUresult code = table.cuInit(0);
    kseal_driver = table; /* the next line needs its cuGetErrorName */
    if (code != 0)
        return kseal_driver_fail("cuInit", code);
    ready = true;
    return KSEAL_OK;
}

kseal_status kseal_driver_open(void) {
    pthread_mutex_lock(&mutex);
    kseal_status status = ready ? KSEAL_OK : open_locked();
    pthread_mutex_unlock(&mutex);
    return status;
}

kseal_status kseal_driver_fail(const char *call, CUresult code) {
    const char *name = NULL, *text = NULL;
    if (kseal_driver.cuGetErrorName(code, &name) != 0 || name == NULL)
        name = "an unknown error";
    if (kseal_driver.cuGetErrorString(code, &text) != 0 || text == NULL)
        text = "the driver has no text for it";
    bool capture = code == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED || code == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    return kseal_fail(capture ? KSEAL_CAPTURING : KSEAL_DRIVER_ERROR, "%s: %s (%d): %s", call, name, code, text);
}

CUresult kseal_driver_current_device(CUdevice *device) {
    CUcontext context;
    CUresult code = kseal_driver.cuCtxGetCurrent(&context);
    if (code != 0)
        return code;
    return context == NULL ? CUDA_ERROR_INVALID_CONTEXT : kseal_driver.cuCtxGetDevice(device);
}

kseal_status kseal_driver_refuse_capture(const char *what, CUstream stream) {
    const CUstream streams[] = {stream, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD};
    CUdevice device;
    CUresult here = kseal_driver_current_device(&device);
    if (here == CUDA_ERROR_INVALID_CONTEXT)
        return KSEAL_OK; /* without a current context nothing of it is being captured */
    if (here != 0)
        return kseal_driver_fail("cuCtxGetDevice", here);
    for (size_t i = 0; i < sizeof streams / sizeof *streams; i++) {
        int capturing = 0;
        CUresult code = kseal_driver.cuStreamIsCapturing(streams[i], &capturing);
        if (code == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || (code == 0 && capturing != 0))
            return kseal_fail(KSEAL_CAPTURING, "%s: a stream is being captured into a graph; do this before the capture", what);
        if (code != 0)
            return kseal_driver_fail("cuStreamIsCapturing", code);
    }
    return KSEAL_OK;
}
