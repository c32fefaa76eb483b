// Copies of memory. What is larger than the caches is streamed past them: a plain store would read
// the memory first, and push out of the cache what the next piece needs.

#pragma once

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX__
constexpr int64_t kWord = 32;
void stream_word(char* target, const char* source) {
  _mm256_stream_si256((__m256i*)target, _mm256_loadu_si256((const __m256i*)source));
}
#elif defined(__SSE2__)
constexpr int64_t kWord = 16;
void stream_word(char* target, const char* source) {
  _mm_stream_si128((__m128i*)target, _mm_loadu_si128((const __m128i*)source));
}
#endif

// Copy past the caches. `end_of_stream` must follow before another thread is told.
void stream(char* target, const char* source, int64_t bytes) {
#ifdef __SSE2__
  constexpr int64_t kLineBytes = 64;
  int64_t head = -(uintptr_t)target & (kLineBytes - 1);
  if (head > bytes) head = bytes;
  memcpy(target, source, head);
  int64_t at = head;
  for (; at + kLineBytes <= bytes; at += kLineBytes)
    for (int64_t word = 0; word < kLineBytes; word += kWord)
      stream_word(target + at + word, source + at + word);
  memcpy(target + at, source + at, bytes - at);
#else
  memcpy(target, source, bytes);
#endif
}

void end_of_stream() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

void copy(char* target, const char* source, int64_t bytes, bool streamed) {
  if (streamed) stream(target, source, bytes);
  else memcpy(target, source, bytes);
}

}  // namespace
