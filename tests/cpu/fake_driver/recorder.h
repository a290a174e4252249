/* A pretend GPU shared by the driver and the runtime functions: its state, its log, and what tests can make it do. */
#ifndef FAKE_RECORDER_H
#define FAKE_RECORDER_H

#include <stddef.h>
#include <stdint.h>

#define FAKE_MAX_PARAMS 64
#define FAKE_MAX_KERNELS 16

struct fake_library {
    unsigned char head[16]; /* first bytes of the image that was loaded */
    int loaded;
};

struct fake_kernel {
    struct fake_library *library;
    char name[512];
};

/* Appends one JSON object with its newline; `format` gives its members after "call". */
void fake_record(const char *call, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The code that a test wants from this call, counted down; 0 where it wants none. */
int fake_injected(const char *call);

/* Grid, block, shared memory, attributes, and the bytes of every parameter as the kernel would get them. */
struct fake_launch {
    uint32_t grid[3], block[3];
    uint64_t smem;
    void *stream;
    const void *attributes; /* 72 bytes each: id, padding, 64 bytes of value */
    uint32_t attribute_count;
};
int fake_launch(const struct fake_launch *launch, const struct fake_kernel *kernel, void **params);

/* One graph at a time: what is launched while `stream` is captured runs when the graph is launched, and not before. */
int fake_begin_capture(void *stream);
int fake_end_capture(void *stream);
int fake_launch_graph(void *stream);
struct fake_node;
int fake_graph_nodes(struct fake_node **nodes, size_t *count);
void fake_node_launch(struct fake_node *node, struct fake_launch *launch, const struct fake_kernel **kernel, void ***params);

int fake_current_device(int *device);
int fake_device_attribute(int *value, int attribute, int device);
int fake_load(struct fake_library **library, const void *image);
int fake_get_kernel(struct fake_kernel **kernel, struct fake_library *library, const char *name);
int fake_kernel_attribute(int *value, int attribute, const struct fake_kernel *kernel, int device);
int fake_set_kernel_attribute(int attribute, int value, const struct fake_kernel *kernel, int device);

/* For tests. */
const char *fake_log(void);
void fake_reset(void);
void fake_fail(const char *call, int code, int after);
void fake_set_device(int count, int major, int minor, int sms);
void fake_set_device_cc(int device, int major, int minor); /* of this one, after fake_set_device */
void fake_set_current(int device);
void fake_set_capturing(int status); /* of every stream */
void fake_set_capturing_stream(void *stream); /* of this one only */
void fake_set_params(const char *kernel, uint32_t count, const uint32_t *sizes);
/* Calls a host function over a stack filled with `byte`, so that what it passes on without having set it shows. */
void fake_call_over(int byte, void (*function)(void **, int32_t), void **args, int32_t count);

#endif
