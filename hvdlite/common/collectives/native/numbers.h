// The types of elements: how they become the type they are combined in, and what they become again.
//
// A type has an Element (in the tensors and the slots), a Value (in which elements are scaled and
// combined) and a Result (what is stored).

#pragma once

#include <stdint.h>
#include <string.h>

namespace {

float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

template <class Number>
struct Plain {
  using Element = Number;
  using Value = Number;
  using Result = Number;
  static Value widen(Element element) { return element; }
  static Result narrow(Value value) { return value; }
};

struct Bfloat16 {
  using Element = uint16_t;
  using Value = float;
  using Result = uint16_t;
  static Value widen(Element element) { return as_float(uint32_t(element) << 16); }
  static Result narrow(Value value) { return Result(rounded(value) >> 16); }
  // The upper half is the element.
  static uint32_t rounded(Value value) {
    uint32_t bits = as_bits(value), nan = (bits & 0x80000000) | 0x7fc00000;
    return (bits & 0x7fffffff) > 0x7f800000 ? nan : bits + 0x7fff + (bits >> 16 & 1);
  }
};

struct Float16 {
  using Element = uint16_t;
  using Value = float;
  using Result = uint16_t;
  static Value widen(Element element);
  static Result narrow(Value value);
};

Float16::Value Float16::widen(Element element) {
  uint32_t sign = uint32_t(element & 0x8000) << 16, bits = element & 0x7fff;
  if (bits >= 0x7c00)  // infinite, or not a number
    return as_float(sign | 0x7f800000 | (bits & 0x3ff) << 13 | (bits > 0x7c00 ? 0x400000 : 0));
  if (bits >= 0x400) return as_float(sign | ((bits << 13) + (112u << 23)));
  return as_float(sign | as_bits(float(bits) * (1.0f / (1 << 24))));  // subnormal, or zero
}

Float16::Result Float16::narrow(Value value) {
  uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return Result(sign | 0x7e00 | (bits >> 13 & 0x3ff));
  if (bits >= 0x477ff000) return Result(sign | 0x7c00);  // rounds to 65536, or is infinite
  if (bits < 0x38800000)                                 // subnormal: let an addition round
    return Result(sign | (as_bits(as_float(bits) + 0.5f) - 0x3f000000));
  bits += 0xfff + (bits >> 13 & 1);
  return Result(sign | (bits - (112u << 23)) >> 13);
}

// 16-bit elements whose result is not rounded: another host adds to it.
template <class Half>
struct Unrounded : Half {
  using Result = float;
  static Result narrow(float value) { return value; }
};

}  // namespace
