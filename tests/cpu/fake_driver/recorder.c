#define _GNU_SOURCE
#include "recorder.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char *text;
static size_t used, room;

static struct {
    char call[64];
    int code, after;
} injected;
static int device_count = 1, cc_major = 9, cc_minor = 0, sm_count = 132, current_device;
static struct {
    int device, major, minor;
} other_cc = {.device = -1};
int fake_capturing;
void *fake_capturing_stream;
/* Parameters of the kernel of that name; of every other in the first, whose name is empty. */
static struct params {
    char name[512];
    uint32_t count, sizes[FAKE_MAX_PARAMS];
} params_of[FAKE_MAX_KERNELS];
/* A context that this thread pushed; -1 for none, when the test's choice holds. */
_Thread_local int fake_pushed = -1;

static void append_locked(const char *format, va_list args) {
    va_list again;
    va_copy(again, args);
    size_t length = (size_t)vsnprintf(NULL, 0, format, again);
    va_end(again);
    if (used + length + 1 > room) {
        room = 2 * (used + length + 1);
        text = realloc(text, room);
        if (text == NULL)
            abort();
    }
    vsnprintf(text + used, room - used, format, args);
    used += length;
}

static void append(const char *format, ...) {
    va_list args;
    va_start(args, format);
    append_locked(format, args);
    va_end(args);
}

static void to_file(size_t from) {
    const char *path = getenv("FAKE_CUDA_LOG");
    FILE *file = path != NULL ? fopen(path, "a") : NULL;
    if (file != NULL) {
        fwrite(text + from, 1, used - from, file);
        fclose(file);
    }
}

void fake_record(const char *call, const char *format, ...) {
    va_list args;
    pthread_mutex_lock(&mutex);
    size_t from = used;
    append("{\"call\": \"%s\", ", call);
    va_start(args, format);
    append_locked(format, args);
    va_end(args);
    append("}\n");
    to_file(from);
    pthread_mutex_unlock(&mutex);
}

int fake_injected(const char *call) {
    int code = 0;
    pthread_mutex_lock(&mutex);
    if (injected.code != 0 && strcmp(call, injected.call) == 0 && injected.after-- <= 0)
        code = injected.code;
    pthread_mutex_unlock(&mutex);
    return code;
}

static void append_hex(const void *data, size_t size) {
    append("\"");
    for (size_t i = 0; i < size; i++)
        append("%02x", ((const unsigned char *)data)[i]);
    append("\"");
}

/* A library named in the environment can stand in for kernels: kernels.c. */
static struct {
    void *library;
    void (*run)(const char *name, void **params);
    uint32_t (*param_size)(const char *name, uint32_t index); /* 0 after the last */
} emulator;

__attribute__((constructor)) static void load_emulator(void) {
    const char *path = getenv("FAKE_CUDA_KERNEL");
    if (path == NULL)
        return;
    emulator.library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void *run = emulator.library != NULL ? dlsym(emulator.library, "fake_kernel") : NULL;
    void *param_size = run != NULL ? dlsym(emulator.library, "fake_kernel_param_size") : NULL;
    if (param_size == NULL)
        abort();
    memcpy(&emulator.run, &run, sizeof run);
    memcpy(&emulator.param_size, &param_size, sizeof param_size);
}

static void emulate(const char *name, void **params) {
    if (emulator.library != NULL)
        emulator.run(name, params);
}

#define GRAPH_NODES 16
#define PARAM_SIZE 128
struct fake_node {
    const struct fake_kernel *kernel;
    struct fake_launch launch;
    unsigned char values[FAKE_MAX_PARAMS][PARAM_SIZE];
    void *params[FAKE_MAX_PARAMS];
};
static struct {
    void *stream; /* that is being captured, or null */
    int count;
    struct fake_node nodes[GRAPH_NODES];
} graph;

int fake_begin_capture(void *stream) {
    graph.stream = fake_capturing_stream = stream;
    graph.count = 0;
    return 0;
}

int fake_end_capture(void *stream) {
    if (stream != graph.stream)
        return 901; /* CUDA_ERROR_STREAM_CAPTURE_INVALIDATED */
    graph.stream = fake_capturing_stream = NULL;
    return 0;
}

static void capture(const struct fake_launch *launch, const struct fake_kernel *kernel, void **params) {
    if (graph.count == GRAPH_NODES || emulator.library == NULL)
        abort();
    struct fake_node *node = &graph.nodes[graph.count++];
    node->kernel = kernel;
    node->launch = *launch;
    for (uint32_t i = 0, size; (size = emulator.param_size(kernel->name, i)) != 0; i++) {
        memcpy(node->values[i], params[i], size);
        node->params[i] = node->values[i];
    }
}

int fake_graph_nodes(struct fake_node **nodes, size_t *count) {
    for (size_t i = 0; nodes != NULL && i < *count && i < (size_t)graph.count; i++)
        nodes[i] = &graph.nodes[i];
    *count = (size_t)graph.count;
    return 0;
}

void fake_node_launch(struct fake_node *node, struct fake_launch *launch, const struct fake_kernel **kernel, void ***params) {
    *launch = node->launch;
    *kernel = node->kernel;
    *params = node->params;
}

int fake_launch_graph(void *stream) {
    fake_record("graph", "\"stream\": %llu, \"nodes\": %d", (unsigned long long)(uintptr_t)stream, graph.count);
    for (int node = 0; node < graph.count; node++)
        emulate(graph.nodes[node].kernel->name, graph.nodes[node].params);
    return 0;
}

static const struct params *find_params(const char *kernel) {
    for (const struct params *its = params_of + 1; its < params_of + FAKE_MAX_KERNELS && its->name[0] != '\0'; its++)
        if (strcmp(its->name, kernel) == 0)
            return its;
    return params_of;
}

int fake_launch(const struct fake_launch *launch, const struct fake_kernel *kernel, void **params) {
    pthread_mutex_lock(&mutex);
    size_t from = used;
    append("{\"call\": \"launch\", \"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"smem\": %llu, ",
           kernel->name, launch->grid[0], launch->grid[1], launch->grid[2], launch->block[0], launch->block[1],
           launch->block[2], (unsigned long long)launch->smem);
    append("\"stream\": %llu, \"attributes\": [", (unsigned long long)(uintptr_t)launch->stream);
    for (uint32_t i = 0; i < launch->attribute_count; i++) {
        const unsigned char *attribute = (const unsigned char *)launch->attributes + 72 * (size_t)i;
        uint32_t id;
        memcpy(&id, attribute, sizeof id);
        /* The kernels here use attributes of one int; the rest of the union is not set by anyone. */
        append("%s[%u, ", i == 0 ? "" : ", ", id);
        append_hex(attribute + 8, 4);
        append("]");
    }
    append("], \"params\": [");
    const struct params *its = find_params(kernel->name);
    for (uint32_t i = 0; i < its->count; i++) {
        append("%s", i == 0 ? "" : ", ");
        append_hex(params[i], its->sizes[i]);
    }
    append("]}\n");
    to_file(from);
    pthread_mutex_unlock(&mutex);
    if (graph.stream != NULL && launch->stream == graph.stream)
        capture(launch, kernel, params);
    else
        emulate(kernel->name, params);
    return 0;
}

int fake_current_device(int *device) {
    int now = fake_pushed >= 0 ? fake_pushed : current_device;
    if (now < 0)
        return 201;
    *device = now;
    return 0;
}

int fake_device_attribute(int *value, int attribute, int device) {
    if (device < 0 || device >= device_count)
        return 101;
    switch (attribute) {
    case 16:
        *value = sm_count;
        return 0;
    case 75:
        *value = device == other_cc.device ? other_cc.major : cc_major;
        return 0;
    case 76:
        *value = device == other_cc.device ? other_cc.minor : cc_minor;
        return 0;
    case 97: /* MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */
        *value = 232448;
        return 0;
    default:
        *value = 1;
        return 0;
    }
}

int fake_load(struct fake_library **library, const void *image) {
    static struct fake_library pool[4096]; /* never reused, so that use after unload shows */
    static int next;
    pthread_mutex_lock(&mutex);
    struct fake_library *loaded = &pool[next++ % 4096];
    pthread_mutex_unlock(&mutex);
    memcpy(loaded->head, image, sizeof loaded->head);
    loaded->loaded = 1;
    *library = loaded;
    pthread_mutex_lock(&mutex);
    size_t from = used;
    append("{\"call\": \"load\", \"image\": ");
    append_hex(loaded->head, sizeof loaded->head);
    append("}\n");
    to_file(from);
    pthread_mutex_unlock(&mutex);
    return 0;
}

int fake_get_kernel(struct fake_kernel **kernel, struct fake_library *library, const char *name) {
    static struct fake_kernel kernels[64];
    static int count;
    if (library == NULL || !library->loaded)
        return 400;
    pthread_mutex_lock(&mutex);
    int i = 0;
    while (i < count && (kernels[i].library != library || strcmp(kernels[i].name, name) != 0))
        i++;
    if (i == count) {
        if (count == 64)
            i = count = 0; /* the oldest are long gone */
        snprintf(kernels[i].name, sizeof kernels[i].name, "%s", name);
        kernels[i].library = library;
        count++;
    }
    *kernel = &kernels[i];
    pthread_mutex_unlock(&mutex);
    fake_record("get_kernel", "\"kernel\": \"%s\"", name);
    return 0;
}

int fake_kernel_attribute(int *value, int attribute, const struct fake_kernel *kernel, int device) {
    (void)kernel;
    (void)device;
    *value = attribute == 1 ? 1024 : 0; /* SHARED_SIZE_BYTES */
    return 0;
}

int fake_set_kernel_attribute(int attribute, int value, const struct fake_kernel *kernel, int device) {
    fake_record("set_attribute", "\"kernel\": \"%s\", \"attribute\": %d, \"value\": %d, \"device\": %d", kernel->name,
                attribute, value, device);
    return 0;
}

const char *fake_log(void) { return text != NULL ? text : ""; }

void fake_reset(void) {
    pthread_mutex_lock(&mutex);
    used = 0;
    if (text != NULL)
        *text = '\0';
    injected.code = 0;
    device_count = 1;
    cc_major = 9;
    cc_minor = 0;
    other_cc.device = -1;
    sm_count = 132;
    current_device = 0;
    fake_capturing = 0;
    fake_capturing_stream = NULL;
    memset(params_of, 0, sizeof params_of);
    pthread_mutex_unlock(&mutex);
}

void fake_fail(const char *call, int code, int after) {
    pthread_mutex_lock(&mutex);
    snprintf(injected.call, sizeof injected.call, "%s", call);
    injected.code = code;
    injected.after = after;
    pthread_mutex_unlock(&mutex);
}

void fake_set_device(int count, int major, int minor, int sms) {
    device_count = count;
    cc_major = major;
    cc_minor = minor;
    sm_count = sms;
}

void fake_set_device_cc(int device, int major, int minor) {
    other_cc.device = device;
    other_cc.major = major;
    other_cc.minor = minor;
}

int fake_device_count(void) { return device_count; }

void fake_set_current(int device) { current_device = device; }

void fake_set_capturing(int status) { fake_capturing = status; }

void fake_set_capturing_stream(void *stream) { fake_capturing_stream = stream; }

void fake_set_params(const char *kernel, uint32_t count, const uint32_t *sizes) {
    struct params *its = params_of;
    if (kernel[0] != '\0')
        while (++its < params_of + FAKE_MAX_KERNELS - 1 && its->name[0] != '\0' && strcmp(its->name, kernel) != 0)
            ;
    snprintf(its->name, sizeof its->name, "%s", kernel);
    its->count = count < FAKE_MAX_PARAMS ? count : FAKE_MAX_PARAMS;
    memcpy(its->sizes, sizes, its->count * sizeof *sizes);
}

__attribute__((noinline)) static void fill_stack(int byte) {
    volatile unsigned char below[1 << 16];
    for (size_t i = 0; i < sizeof below; i++)
        below[i] = (unsigned char)byte;
}

void fake_call_over(int byte, void (*function)(void **, int32_t), void **args, int32_t count) {
    fill_stack(byte);
    function(args, count);
}

/*
 * For a process that a test only starts: FAKE_CUDA_CC=90 is the devices' SM, FAKE_CUDA_DEVICES how many there are,
 * FAKE_CUDA_FAIL=cuInit:100 a call that fails and its code.
 */
__attribute__((constructor)) static void from_environment(void) {
    const char *cc = getenv("FAKE_CUDA_CC"), *devices = getenv("FAKE_CUDA_DEVICES"), *fail = getenv("FAKE_CUDA_FAIL");
    if (fail != NULL && strchr(fail, ':') != NULL) {
        snprintf(injected.call, sizeof injected.call, "%.*s", (int)(strchr(fail, ':') - fail), fail);
        injected.code = atoi(strchr(fail, ':') + 1);
    }
    if (devices != NULL)
        device_count = atoi(devices);
    if (cc != NULL) {
        cc_major = atoi(cc) / 10;
        cc_minor = atoi(cc) % 10;
    }
}
