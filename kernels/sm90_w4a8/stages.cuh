// The stages of kernels with panels of weights that are decoded to E4M3. A panel's PANEL_BYTES are defined before.

constexpr int SCALE_WARPS = 0, X_PARTS = 1;
constexpr int MATH_REGISTERS = 232, OTHER_REGISTERS = 40;  // of a thread
constexpr u32 W_BYTES = 2 * PANEL_BYTES;
constexpr u32 X_BYTES = ROWS * 128;
constexpr u32 OFF_X = 0;
constexpr u32 OFF_W = STAGES * X_BYTES;
constexpr u32 OFF_FULL = OFF_W + STAGES * W_BYTES;
constexpr u32 SCRATCH_BYTES = 0;

//CLASSES

#include "sm90/schedule.cuh"
#include "sm90/activation.cuh"
#include "sm90/panels.cuh"
#include "sm90/token_scales.cuh"
