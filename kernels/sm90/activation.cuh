// The activation functions, as moequant/act_fn.py defines them. Macros:
//   ACT: 0 silu, 1 gelu, 2 gelu_tanh, 3 swigluoai, 4 relu2, 5 swiglustep, 6 situ; the order of ACT_FNS in
//     sm90/grouped_gemm.py
//   LIMITED: clamp gate (in swiglustep the function of it) from above and up on both sides to `limit`
//   GATED: multiply by up

// alpha: factor within the sigmoid of swigluoai.
// beta: in swigluoai added to up; in situ, gate becomes beta * tanh(gate / beta).
// linear_beta: in situ, up becomes linear_beta * tanh(up / linear_beta); 0 leaves it as it is.
struct ActParameters { float alpha, limit, beta, linear_beta; };
// Comparisons, because fminf and fmaxf return the other operand if one is NaN.
__device__ __forceinline__ float at_most(float x, float limit) { return x > limit ? limit : x; }
__device__ __forceinline__ float at_least(float x, float limit) { return x < limit ? limit : x; }
// Returns f(x), multiplied by `up` if GATED. x is gate, or up if there is no gate.
__device__ __forceinline__ float activate(float x, float up, const ActParameters& p) {
#if LIMITED
#if ACT != 5  // swiglustep (5) clamps silu(x) below instead of x
  x = at_most(x, p.limit);
#endif
  up = at_least(at_most(up, p.limit), -p.limit);
#endif
#if ACT == 0  // silu
  const float y = __fdividef(x, 1.f + __expf(-x));
#elif ACT == 1  // gelu
  const float y = 0.5f * x * (1.f + erff(x * 0.70710678118654752f));
#elif ACT == 2  // gelu_tanh: (1 + tanh(z)) / 2 is the sigmoid of 2 z
  const float y = __fdividef(x, 1.f + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
#elif ACT == 3  // swigluoai
  const float y = __fdividef(x, 1.f + __expf(-p.alpha * x));
  up += p.beta;
#elif ACT == 5  // swiglustep
  const float y = at_most(__fdividef(x, 1.f + __expf(-x)), p.limit);
#elif ACT == 6  // situ
  const float y = p.beta * tanhf(__fdividef(x, p.beta)) * __fdividef(1.f, 1.f + __expf(-x));
  if (p.linear_beta > 0.f) up = p.linear_beta * tanhf(__fdividef(up, p.linear_beta));
#elif ACT == 4  // relu2
  const float positive = at_least(x, 0.f), y = positive * positive;
#else
#error "ACT must be 0 to 6"
#endif
  return GATED ? y * up : y;
}
