#ifndef TEST_STUB_HOST_H
#define TEST_STUB_HOST_H

/* What the stub's host function does instead of just launching. */
extern enum stub_mode {
    STUB_LAUNCH,
    STUB_ENCODE,        /* encodes a tensor map first, checked as CuTe checks: by an assert that may not return */
    STUB_FAIL_QUIETLY,  /* returns 700 without any driver call */
    STUB_LOAD_ONE,      /* looks up the first kernel only */
    STUB_IGNORE_LAUNCH, /* returns 0 whatever the launch said */
} stub_mode;

/* Arguments of the last call, its result included. */
extern _Atomic int stub_argument_count;

#endif
