// Reads the strings of a GGUF file in one call: a vocabulary has a hundred thousand strings, and every start waits for
// them.
#include "bind/bindings.h"

namespace weft {
namespace {

// Returns the list of strings and the end of the last one. Returns None if a string does not end before `end` or is
// not UTF-8; the caller makes the error message. Model files are untrusted, so every length is checked before it is
// used.
nb::object read_strings(nb::handle data, size_t position, size_t count, size_t end) {
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  const char* bytes = static_cast<const char*>(view.buf);
  nb::object result = nb::none();
  if (end <= static_cast<size_t>(view.len) && position <= end && count <= (end - position) / sizeof(uint64_t)) {
    nb::object strings = nb::steal(PyList_New(static_cast<Py_ssize_t>(count)));
    size_t done = 0;
    for (; strings.is_valid() && done < count && end - position >= sizeof(uint64_t); ++done) {
      uint64_t length = 0;
      for (size_t byte = 0; byte < sizeof length; ++byte)
        length |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[position + byte])) << (8 * byte);
      position += sizeof length;
      if (length > end - position) break;
      PyObject* text = PyUnicode_DecodeUTF8(bytes + position, static_cast<Py_ssize_t>(length), nullptr);
      if (text == nullptr) break;
      PyList_SET_ITEM(strings.ptr(), static_cast<Py_ssize_t>(done), text);
      position += length;
    }
    if (PyErr_Occurred() != nullptr) PyErr_Clear();
    if (strings.is_valid() && done == count) result = nb::make_tuple(strings, position);
  }
  PyBuffer_Release(&view);
  return result;
}

}  // namespace

void bind_strings(nb::module_& module) {
  module.def("read_strings", &read_strings, nb::arg("data"), nb::arg("position"), nb::arg("count"), nb::arg("end"),
             "Reads `count` strings, each after its 64-bit length, from `position` up to `end`. Returns (strings, end position) or None.");
}

}  // namespace weft
