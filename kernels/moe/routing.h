// The experts of a token and their weights, of its router's logits.
#pragma once

#include <algorithm>
#include <cmath>

#include "../simd.h"

namespace headrace {

constexpr int kMaxExperts = 1024;

enum class Score : int32_t { kSoftmax = 0, kSigmoid = 1, kSoftmaxAfterTopk = 2 };

struct Routing {
  const float* bias;  // Added to scores for the choice; null adds nothing.
  int32_t num_experts, top_k;
  Score score;
  int32_t is_renormalized, num_groups, top_k_groups;
  int32_t num_best;  // Of a group: the scores whose sum it is chosen by.
  float scale;
};

// Puts `count` logits through a softmax; in place.
inline void softmax(float* values, int count) {
  float highest = values[0];
  for (int i = 1; i < count; ++i) highest = values[i] > highest ? values[i] : highest;
  float sum = 0.0f;
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats powers = exp_nonpositive(load(values + i) - highest);
    store(values + i, powers);
    sum += horizontal_sum(powers);
  }
  for (; i < count; ++i) sum += values[i] = exp_nonpositive(splat(values[i] - highest))[0];
  for (i = 0; i < count; ++i) values[i] /= sum;
}

inline void sigmoid(float* values, int count) {
  for (int i = 0; i < count; ++i) {
    const float e = exp_nonpositive(splat(-std::fabs(values[i])))[0];
    values[i] = (values[i] < 0.0f ? e : 1.0f) / (1.0f + e);
  }
}

// The best candidates seen, of equal ones the earlier first. Whatever the scores are, these are candidates.
struct Best {
  int32_t* ids;
  int capacity;
  int count = 0;

  void offer(int candidate, const float* scores) {
    int place = count;
    while (place > 0 && scores[candidate] > scores[ids[place - 1]]) --place;
    if (place >= capacity) return;
    count = std::min(count + 1, capacity);
    std::copy_backward(ids + place, ids + count - 1, ids + count);
    ids[place] = candidate;
  }
};

// Marks the groups that a token chooses from.
inline void choose_groups(const Routing& routing, const float* choice, bool* is_chosen) {
  const int size = routing.num_experts / routing.num_groups;
  float worth[kMaxExperts];
  int32_t ids[kMaxExperts];
  for (int group = 0; group < routing.num_groups; ++group) {
    Best best{ids, routing.num_best};
    for (int i = 0; i < size; ++i) best.offer(group * size + i, choice);
    worth[group] = 0.0f;
    for (int rank = 0; rank < best.count; ++rank) worth[group] += choice[ids[rank]];
    is_chosen[group] = false;
  }
  Best best{ids, routing.top_k_groups};
  for (int group = 0; group < routing.num_groups; ++group) best.offer(group, worth);
  for (int rank = 0; rank < best.count; ++rank) is_chosen[ids[rank]] = true;
}

inline void route_row(const Routing& routing, const float* logits, int32_t* ids, float* weights) {
  float scores[kMaxExperts], biased[kMaxExperts];
  bool is_chosen[kMaxExperts];
  const int count = routing.num_experts, top_k = routing.top_k;
  std::copy(logits, logits + count, scores);
  if (routing.score == Score::kSoftmax) softmax(scores, count);
  if (routing.score == Score::kSigmoid) sigmoid(scores, count);
  const float* choice = scores;
  if (routing.bias) {
    for (int i = 0; i < count; ++i) biased[i] = scores[i] + routing.bias[i];
    choice = biased;
  }
  const bool has_groups = routing.top_k_groups < routing.num_groups;
  if (has_groups) choose_groups(routing, choice, is_chosen);
  const int size = count / routing.num_groups;
  Best best{ids, top_k};
  for (int group = 0; group < routing.num_groups; ++group)
    if (!has_groups || is_chosen[group])
      for (int i = group * size; i < (group + 1) * size; ++i) best.offer(i, choice);
  float sum = 1e-20f;  // As reference.py has it.
  for (int rank = 0; rank < top_k; ++rank) weights[rank] = scores[ids[rank]];
  if (routing.score == Score::kSoftmaxAfterTopk) softmax(weights, top_k);
  for (int rank = 0; rank < top_k; ++rank) sum += weights[rank];
  const float factor = routing.is_renormalized ? routing.scale / sum : routing.scale;
  for (int rank = 0; rank < top_k; ++rank) weights[rank] *= factor;
}

}  // namespace headrace
