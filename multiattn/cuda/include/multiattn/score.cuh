// An expression that changes every score, as kernels use it: a struct that multiattn/cuda/score.py writes, or NoScore.
#pragma once
#include "multiattn/ptx.cuh"

namespace multiattn {

struct NoScore {};  // a score is q k^T times the scale

// The parts of such a struct: a change of scores, a mask of partial blocks, gradients of the tensors that it loads from.
template <class Score, class = void>
constexpr bool HAS_SCORE = false;
template <class Score>
constexpr bool HAS_SCORE<Score, decltype(static_cast<void>(&Score::score))> = true;
template <class Score, class = void>
constexpr bool HAS_MASK = false;
template <class Score>
constexpr bool HAS_MASK<Score, decltype(static_cast<void>(&Score::mask))> = true;
// A mask of the last keys alone, in tiles that no block mask lists: so many.
template <class Score, class = void>
constexpr bool HAS_TAIL = false;
template <class Score>
constexpr bool HAS_TAIL<Score, decltype(static_cast<void>(&Score::tail))> = true;
template <class Score, class = void>
constexpr bool HAS_GRADIENTS = false;
template <class Score>
constexpr bool HAS_GRADIENTS<Score, decltype(static_cast<void>(&Score::add_sums))> = true;

// True if a gradient is of more than the weight and dP - delta: the expression is no sum, or its slope is of the score.
template <class Score, bool = HAS_GRADIENTS<Score>>
constexpr bool NEEDS_RAW = false;
template <class Score>
constexpr bool NEEDS_RAW<Score, true> = Score::NEEDS_RAW;

struct Nothing {
  int32 nothing;
};
template <class Score>
struct AuxOf {
  using Type = typename Score::Aux;
};
template <>
struct AuxOf<NoScore> {
  using Type = Nothing;
};
template <class Score, bool = HAS_GRADIENTS<Score>>
struct GradientsOf {
  using Type = Nothing;
};
template <class Score>
struct GradientsOf<Score, true> {
  using Type = typename Score::Gradients;
};

// The parameters of a kernel; behind them those of the expression, where to add its gradients, the lists of a block mask.
template <class Params, class Score, class Lists = void, bool = HAS_GRADIENTS<Score>>
struct WithAux {
  struct Type : Params {
    typename AuxOf<Score>::Type aux;
    typename GradientsOf<Score>::Type gradients;
    Lists lists;
  };
};
template <class Params, class Score>
struct WithAux<Params, Score, void, true> {
  struct Type : Params {
    typename Score::Aux aux;
    typename Score::Gradients gradients;
  };
};
template <class Params, class Score>
struct WithAux<Params, Score, void, false> {
  struct Type : Params {
    typename Score::Aux aux;
  };
};
template <class Params>
struct WithAux<Params, NoScore, void, false> {
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

  // The weight of a score by an lse that is not -inf. (Were `weight` made of this, kernels of other archs would compile to other code.)
  DEVICE float weight_of_seen(float raw, int query, Position key, float lse_log2, float& sloped) const {
    float slope;
    const float score = Score::score_and_slope(raw, batch_, head_, query, key, seq_q_, seq_kv_, aux_, slope);
    const float weight = exp2_approx(score - lse_log2);
    sloped = weight * slope;
    return weight;
  }

  // As `weight_of_seen`, for a kernel whose expression has exponents.
  DEVICE float weight_of_exponent(float raw, Position query, Position key, float lse_log2, float& sloped) const {
    float slope;
    const float exponent =
        Score::exponent_and_slope(raw, lse_log2, batch_, head_, query, key, seq_q_, seq_kv_, aux_, slope);
    const float weight = exp2_approx(exponent);
    sloped = weight * slope;
    return weight;
  }

  // As `weight`, and the slope by itself.
  DEVICE float weight_and_slope(float raw, int query, int key, float lse_log2, float& slope) const {
    const float score = Score::score_and_slope(raw, batch_, head_, query, key, seq_q_, seq_kv_, aux_, slope);
    return exp2_approx(score - (lse_log2 == -infinity() ? infinity() : lse_log2));
  }

  // True if the query sees the key of a partial block.
  DEVICE bool visible(int query, Position key) const {
    return Score::mask(batch_, head_, query, key, seq_q_, seq_kv_, aux_);
  }

  // Adds a score's share to the gradients of captured tensors, of which `sums` stay with the thread until `add_sums`. `dscore`
  // is the gradient of the expression's score, in its natural domain; `raw` may be anything unless NEEDS_RAW.
  template <class Gradients>
  DEVICE void add_gradients(const Gradients& gradients, float raw, float dscore, int query, int key, float* sums) const {
    Score::load_gradients(raw, dscore, batch_, head_, query, key, seq_q_, seq_kv_, aux_, gradients, sums);
  }
  template <class Gradients>
  DEVICE void add_sums(const Gradients& gradients, const float* sums) const {
    Score::add_sums(batch_, head_, aux_, gradients, sums);
  }

 private:
  const typename Score::Aux& aux_;
  int batch_, head_, seq_q_, seq_kv_;
};
template <>
class HeadScores<NoScore> {
 public:
  template <class Params>
  DEVICE HeadScores(const Params&, int, int) {}
  DEVICE HeadScores(const Nothing&, int, int, int, int) {}
};

}  // namespace multiattn
