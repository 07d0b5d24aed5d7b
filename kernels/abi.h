// What the exported functions and the structures that they take look like, for kernels/cpu_library.py, which compares it with
// what Python declares. Both are written by hand: a difference would be read as other fields, silently.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace headrace {

struct Field {
  const char* name;
  int32_t offset, size;
};

struct StructureDescription {
  const Field* fields;
  int32_t num_fields, size;
};

template <typename T>
constexpr char type_letter() {
  if constexpr (std::is_void_v<T>) return 'v';
  if constexpr (std::is_pointer_v<T>) return 'p';
  if constexpr (std::is_same_v<T, int32_t>) return 'i';
  if constexpr (std::is_same_v<T, int64_t>) return 'l';
  if constexpr (std::is_same_v<T, float>) return 'f';
  return '?';
}

// The types of a function's result and of its arguments, a letter each.
template <typename Result, typename... Arguments>
struct Signature {
  char letters[sizeof...(Arguments) + 2] = {type_letter<Result>(), type_letter<Arguments>()..., 0};
};

template <typename Result, typename... Arguments>
constexpr Signature<Result, Arguments...> signature_of(Result (*)(Arguments...)) {
  return {};
}

}  // namespace headrace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Behind the definition of each exported function.
#define EXPORT_SIGNATURE(name)                                                         \
  EXPORTED const char* headrace_##name##_signature() {                                 \
    static constexpr auto kSignature = headrace::signature_of(&headrace_##name);       \
    return kSignature.letters;                                                         \
  }

// A field, and one that Python calls by another name.
#define FIELD(name) FIELD_AT(name, name)
#define FIELD_AT(name, member) \
  { #name, offsetof(Structure, member), sizeof(static_cast<Structure*>(nullptr)->member) }

// All fields of a structure that an exported function takes, in a file that is compiled once.
#define EXPORT_STRUCTURE(Type, ...)                                                                              \
  EXPORTED const headrace::StructureDescription* headrace_structure_##Type() {                                   \
    using Structure = headrace::Type;                                                                            \
    static constexpr headrace::Field kFields[] = {__VA_ARGS__};                                                  \
    static constexpr headrace::StructureDescription kDescription{kFields, sizeof(kFields) / sizeof(kFields[0]),  \
                                                                 sizeof(Structure)};                             \
    return &kDescription;                                                                                        \
  }
