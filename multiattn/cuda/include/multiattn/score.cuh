// An expression that changes every score, as kernels use it: a struct that multiattn/cuda/score.py writes, or NoScore.
#pragma once
#include "multiattn/ptx.cuh"

namespace multiattn {

struct NoScore {};  // a score is q k^T times the scale

template <class Score>
constexpr bool HAS_SCORE = true;
template <>
constexpr bool HAS_SCORE<NoScore> = false;

// The parameters of a kernel, those of the expression behind them.
template <class Params, class Score>
struct WithAux {
  struct Type : Params {
    typename Score::Aux aux;
  };
};
template <class Params>
struct WithAux<Params, NoScore> {
  using Type = Params;
};

// A position as an unrolled loop has it: `step` is a constant there, so that of many positions one `base` is in a register.
struct Position {
  int32 base, step;
  DEVICE Position(int32 base, int32 step = 0) : base(base), step(step) {}
  DEVICE int32 index() const { return base + step; }
};

// The scores of one query head. `raw` is an element of q k^T; what comes of it is in the log2 domain, the scale in it.
template <class Score>
class HeadScores {
 public:
  template <class Params>
  DEVICE HeadScores(const Params& params, int batch, int head)
      : HeadScores(params.aux, params.seq_q, params.seq_kv, batch, head) {}
  DEVICE HeadScores(const typename Score::Aux& aux, int seq_q, int seq_kv, int batch, int head)
      : aux_(aux), batch_(batch), head_(head), seq_q_(seq_q), seq_kv_(seq_kv) {}

  DEVICE float score(float raw, int query, Position key) const {
    return Score::score(raw, batch_, head_, query, key, seq_q_, seq_kv_, aux_);
  }

  // exp2(score - lse_log2); `sloped` is that times the slope of the expression, the factor of dP - delta in dS. A row of
  // which the expression hides every key has an lse of -inf, and no weights.
  DEVICE float weight(float raw, int query, int key, float lse_log2, float& sloped) const {
    float slope;
    const float score = Score::score_and_slope(raw, batch_, head_, query, key, seq_q_, seq_kv_, aux_, slope);
    const float weight = exp2_approx(score - (lse_log2 == -infinity() ? infinity() : lse_log2));
    sloped = weight * slope;
    return weight;
  }

 private:
  const typename Score::Aux& aux_;
  int batch_, head_, seq_q_, seq_kv_;
};

}  // namespace multiattn
