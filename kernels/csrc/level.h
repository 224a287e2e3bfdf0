// What differs between the levels: names, tiles of the products, and which dot products there are.
// Every level's kernels are compiled from the same sources with its own LEVEL and flags.
#pragma once
#include "vec.h"

#define JOIN_(a, b) specbatch_##a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(function) JOIN(function, LEVEL)
#define EXPORT __attribute__((visibility("default")))

#if defined(__AMX_BF16__)
#define HAVE_AMX 1
#else
#define HAVE_AMX 0
#endif
#if defined(__AVX512BF16__)
#define HAVE_DOT 1  // an instruction for pairs of bfloat16 products
#else
#define HAVE_DOT 0
#endif

// A panel is VECTORS native vectors of outputs. At most TILE_VECTORS accumulators are in use at a time:
// what the registers hold beside the weights and one activation.
#if W == 16
#define VECTORS 2
#define TILE_ROWS 12
#define TILE_VECTORS 24
#elif W == 8
#define VECTORS 2
#define TILE_ROWS 6
#define TILE_VECTORS 12
#else
#define VECTORS 4
#define TILE_ROWS 6
#define TILE_VECTORS 24
#endif
#define PANEL (VECTORS * W)
