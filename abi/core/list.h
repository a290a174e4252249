/* The list of pointers that a CuTe host function or a kernel takes, for launch code. */
#ifndef KSEAL_CORE_LIST_H
#define KSEAL_CORE_LIST_H

#include <stdbool.h>
#include <stdint.h>

/* Tensors as CuTe passes them: the base, then the extents and strides that are not compiled in. */
struct vector {
    const void *data;
    int32_t size;
};
struct matrix {
    const void *data;
    int32_t shape[2];
    int64_t stride;
};

#define KSEAL_LIST_END 40 /* with a place for the result of a host function; the longest list has 33 */

struct list {
    void *args[KSEAL_LIST_END];
    int32_t count;
};

static inline void add(struct list *list, void *arg) { list->args[list->count++] = arg; }

/* An argument that this variant was compiled without is not in its list at all. */
static inline void add_if(struct list *list, bool present, void *arg) {
    if (present)
        add(list, arg);
}

#endif
