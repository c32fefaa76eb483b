// The reduction of elements over members, in the order of the members.

#pragma once

#include <stdint.h>
#include <string.h>

#include <type_traits>
#if defined(__F16C__) && defined(__AVX__)
#include <immintrin.h>
#endif

#include "numbers.h"

namespace {

constexpr int64_t kBlock = 2048;  // elements that are combined at a time, in the first cache

// Operations. What is no number stays none, as with numpy; of equals the later one counts.

struct Sum {
  template <class Value>
  static Value combine(Value a, Value b) { return Value(a + b); }
};

struct Product {
  template <class Value>
  static Value combine(Value a, Value b) {
    if constexpr (sizeof(Value) < sizeof(uint32_t))  // as int they could overflow
      return Value(uint32_t(a) * uint32_t(b));
    else return a * b;
  }
};

struct Minimum {
  template <class Value>
  static Value combine(Value a, Value b) { return (a < b || a != a) ? a : b; }
};

struct Maximum {
  template <class Value>
  static Value combine(Value a, Value b) { return (a > b || a != a) ? a : b; }
};

struct BitAnd {
  template <class Value>
  static Value combine(Value a, Value b) { return Value(a & b); }
};

struct BitOr {
  template <class Value>
  static Value combine(Value a, Value b) { return Value(a | b); }
};

struct BitXor {
  template <class Value>
  static Value combine(Value a, Value b) { return Value(a ^ b); }
};

// Whether eight sums of float16 are converted by one instruction.
template <class Type, class Operation>
constexpr bool by_eight =
#if defined(__F16C__) && defined(__AVX__)
    std::is_same_v<Type, Float16> && std::is_same_v<Operation, Sum>;
#else
    false;
#endif

// results = postscale * (prescale * parts[0] op prescale * parts[1] op ...), in this order, and the
// same in `also` if there is one. `results` may be one of the parts. Integers are not scaled.
template <class Type, class Operation>
struct Reducer {
  using Element = typename Type::Element;
  using Value = typename Type::Value;
  using Result = typename Type::Result;
  int64_t members;
  Value prescale, postscale;

  static void reduce(int64_t members, double prescale, double postscale, const char* const* parts,
                     int64_t size, char* results, char* also) {
    const Reducer reducer{members, Value(prescale), Value(postscale)};
    reducer.run((const Element* const*)parts, size, (Result*)results, (Result*)also);
  }

  void run(const Element* const* parts, int64_t size, Result* results, Result* also) const {
    if (members == 2) {
      combine_two(parts[0], parts[1], size, results);
      if (also != nullptr) memcpy(also, results, size * sizeof(Result));
      return;
    }
    alignas(64) Value total[kBlock];
    for (int64_t start = 0; start < size; start += kBlock) {
      int64_t n = size - start < kBlock ? size - start : kBlock;
      load(parts[0] + start, n, total);
      for (int64_t m = 1; m < members; ++m) merge(parts[m] + start, n, total);
      store(total, n, results + start);
      if (also != nullptr) memcpy(also + start, results + start, n * sizeof(Result));
    }
  }

  Value taken(Element element) const {
    if constexpr (std::is_integral_v<Value>) return element;
    else return Type::widen(element) * prescale;
  }

  Result given(Value value) const {
    if constexpr (std::is_integral_v<Value>) return value;
    else return Type::narrow(value * postscale);
  }

  // Loops over elements that depend on nothing but elements in the same place.

  void combine_two(const Element* first, const Element* second, int64_t n, Result* results) const {
    int64_t i = 0;
#if defined(__F16C__) && defined(__AVX__)
    if constexpr (by_eight<Type, Operation>)
      for (; i + 8 <= n; i += 8)
        put8(results + i, _mm256_add_ps(take8(first + i), take8(second + i)));
#endif
    if constexpr (std::is_same_v<Type, Bfloat16>) i = combine_pairs(first, second, n, results);
#pragma GCC ivdep
    for (int64_t k = i; k < n; ++k)
      results[k] = given(Operation::combine(taken(first[k]), taken(second[k])));
  }

  // Two elements of bfloat16 are the halves of a word: none is widened or packed by itself.
  int64_t combine_pairs(const Element* first, const Element* second, int64_t n,
                        Result* results) const {
    int64_t pairs = n / 2;
#pragma GCC ivdep
    for (int64_t k = 0; k < pairs; ++k) {
      uint32_t a, b;
      memcpy(&a, first + 2 * k, 4);
      memcpy(&b, second + 2 * k, 4);
      uint32_t low = combine_words(a << 16, b << 16);
      uint32_t high = combine_words(a & 0xffff0000, b & 0xffff0000);
      uint32_t both = low >> 16 | (high & 0xffff0000);
      memcpy(results + 2 * k, &both, 4);
    }
    return 2 * pairs;
  }

  uint32_t combine_words(uint32_t a, uint32_t b) const {
    return Type::rounded(Operation::combine(as_float(a) * prescale, as_float(b) * prescale) *
                         postscale);
  }

  void load(const Element* part, int64_t n, Value* total) const {
    int64_t i = 0;
#if defined(__F16C__) && defined(__AVX__)
    if constexpr (by_eight<Type, Operation>)
      for (; i + 8 <= n; i += 8) _mm256_storeu_ps(total + i, take8(part + i));
#endif
#pragma GCC ivdep
    for (int64_t k = i; k < n; ++k) total[k] = taken(part[k]);
  }

  void merge(const Element* part, int64_t n, Value* total) const {
    int64_t i = 0;
#if defined(__F16C__) && defined(__AVX__)
    if constexpr (by_eight<Type, Operation>)
      for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(total + i, _mm256_add_ps(_mm256_loadu_ps(total + i), take8(part + i)));
#endif
#pragma GCC ivdep
    for (int64_t k = i; k < n; ++k) total[k] = Operation::combine(total[k], taken(part[k]));
  }

  void store(const Value* total, int64_t n, Result* results) const {
    int64_t i = 0;
#if defined(__F16C__) && defined(__AVX__)
    if constexpr (by_eight<Type, Operation>)
      for (; i + 8 <= n; i += 8) put8(results + i, _mm256_loadu_ps(total + i));
#endif
#pragma GCC ivdep
    for (int64_t k = i; k < n; ++k) results[k] = given(total[k]);
  }

#if defined(__F16C__) && defined(__AVX__)
  __m256 take8(const Element* half) const {
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)half)),
                         _mm256_set1_ps(float(prescale)));
  }

  void put8(Result* half, __m256 sum) const {
    __m256 scaled = _mm256_mul_ps(sum, _mm256_set1_ps(float(postscale)));
    _mm_storeu_si128((__m128i*)half, _mm256_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
};

using Reduce = void (*)(int64_t members, double prescale, double postscale,
                        const char* const* parts, int64_t size, char* results, char* also);

template <class Type>
Reduce reduce_by(int64_t operation) {
  if constexpr (std::is_integral_v<typename Type::Value> &&
                std::is_unsigned_v<typename Type::Value>) {  // floats have no bits to combine
    switch (operation) {
      case 4: return Reducer<Type, BitAnd>::reduce;
      case 5: return Reducer<Type, BitOr>::reduce;
      case 6: return Reducer<Type, BitXor>::reduce;
    }
  }
  switch (operation) {
    case 0: return Reducer<Type, Sum>::reduce;
    case 1: return Reducer<Type, Product>::reduce;
    case 2: return Reducer<Type, Minimum>::reduce;
    default: return Reducer<Type, Maximum>::reduce;
  }
}

// The same: only what is least or greatest depends on the sign. Sums and products wrap around.
template <class Signed>
Reduce reduce_signed(int64_t operation) {
  using Unsigned = std::make_unsigned_t<Signed>;
  if (operation == 2 || operation == 3) return reduce_by<Plain<Signed>>(operation);
  return reduce_by<Plain<Unsigned>>(operation);
}

// The codes of `native/library.py`: TYPES and OPERATIONS.
Reduce reduce_of(int64_t type, int64_t operation) {
  switch (type) {
    case 0: return reduce_by<Plain<float>>(operation);
    case 1: return reduce_by<Plain<double>>(operation);
    case 2: return reduce_by<Float16>(operation);
    case 3: return reduce_by<Bfloat16>(operation);
    case 4: return reduce_by<Plain<uint8_t>>(operation);
    case 5: return reduce_by<Plain<uint16_t>>(operation);
    case 6: return reduce_by<Plain<uint32_t>>(operation);
    case 7: return reduce_by<Plain<uint64_t>>(operation);
    case 8: return reduce_signed<int8_t>(operation);
    case 9: return reduce_signed<int16_t>(operation);
    case 10: return reduce_signed<int32_t>(operation);
    case 11: return reduce_signed<int64_t>(operation);
    case 12: return reduce_by<Unrounded<Float16>>(operation);
    default: return reduce_by<Unrounded<Bfloat16>>(operation);
  }
}

}  // namespace
