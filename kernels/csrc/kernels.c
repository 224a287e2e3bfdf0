// All kernels of one level: compiled once for each, with -DLEVEL=... and the level's flags.
#include "multi_step.h"
