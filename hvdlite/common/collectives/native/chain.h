// The parts of tensors that go one behind the other through the slots.

#pragma once

#include <stdint.h>

#include "copies.h"
#include "segment.h"

namespace {

constexpr int64_t kMaxMembers = 256;  // of a group on one host

class Chain {
 public:
  int64_t total = 0;  // elements

  Chain() = default;
  Chain(const Work& work, const Chains& chains, int64_t number)
      : sizes_(chains.sizes + number * work.tensors),
        addresses_(chains.addresses + number * work.tensors),
        itemsize_(work.itemsize) {
    for (int64_t tensor = 0; tensor < work.tensors; ++tensor) total += sizes_[tensor];
  }

  // How many of `most` elements there are from `from` on.
  int64_t left(int64_t from, int64_t most) const {
    int64_t rest = total - from;
    return rest < 0 ? 0 : rest < most ? rest : most;
  }

  char* address(int64_t tensor, int64_t element, int64_t itemsize) const {
    return addresses_[tensor] + element * itemsize;
  }

  // Call use(tensor, from, n) for the stretches of tensors that hold [from, to). `from` only grows.
  template <class Use>
  void spans(int64_t from, int64_t to, Use use) {
    cursor_.spans(sizes_, from, to, use);
  }

  // Copy [from, to) to a slot.
  void pack(int64_t from, int64_t to, char* slot) {
    spans(from, to, [&](int64_t tensor, int64_t at, int64_t n) {
      memcpy(slot, address(tensor, at, itemsize_), n * itemsize_);
      slot += n * itemsize_;
    });
  }

  // Copy from a slot to [from, to).
  void unpack(int64_t from, int64_t to, const char* slot, bool streamed) {
    spans(from, to, [&](int64_t tensor, int64_t at, int64_t n) {
      copy(address(tensor, at, itemsize_), slot, n * itemsize_, streamed);
      slot += n * itemsize_;
    });
  }

 private:
  const int64_t* sizes_;
  char* const* addresses_;
  int64_t itemsize_;
  Cursor cursor_;
};

}  // namespace
