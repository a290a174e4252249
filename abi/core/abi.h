/* kernseal.h as the library itself sees it: its functions are the only visible symbols. */
#ifndef KSEAL_CORE_ABI_H
#define KSEAL_CORE_ABI_H

#define KSEAL_API __attribute__((visibility("default")))
#include "kernseal.h"

#endif
