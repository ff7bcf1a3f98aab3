// Directory, eviction order and block counts as Python sees them. `forebay/_native.pyi` says what
// each call does.
#include "directory/directory_bindings.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "directory/counts.hpp"
#include "directory/directory.hpp"
#include "directory/order.hpp"
#include "directory/python_arrays.hpp"

namespace nb = nanobind;

namespace forebay {

namespace {

std::string_view name_argument(nb::handle name) {
  if (!PyBytes_Check(name.ptr())) throw ProtocolError("a namespace must be bytes");
  return {PyBytes_AS_STRING(name.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(name.ptr()))};
}

KeyBytes keys_argument(nb::handle keys) {
  // A buffer that can change would make the "same object" test of a session a lie.
  if (!PyBytes_CheckExact(keys.ptr())) {
    throw ProtocolError(std::string("keys must be bytes, not ") + Py_TYPE(keys.ptr())->tp_name);
  }
  return {reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(keys.ptr())),
          static_cast<std::size_t>(PyBytes_GET_SIZE(keys.ptr()))};
}

// `forebay.core.directory.Session`, or None.
class SessionArgument {
 public:
  SessionArgument(nb::handle session, nb::handle keys) {
    if (session.is_none()) return;
    if (!PyTuple_Check(session.ptr()) || PyTuple_GET_SIZE(session.ptr()) != 5) {
      throw ProtocolError("a session must be one that a match returned, or None");
    }
    const auto field = [&](Py_ssize_t at) { return PyTuple_GET_ITEM(session.ptr(), at); };
    resume_.name = name_argument(field(0));
    resume_.block = integer_argument(field(1));
    resume_.insert = integer_argument(field(2));
    ids_object_ = field(3);
    ids_.emplace(ids_object_, "a session's ids");
    resume_.known = static_cast<std::int64_t>(ids_->values().size());
    const nb::handle its_keys = field(4);
    if (!its_keys.is_none()) {
      keys_ = keys_argument(its_keys);
      resume_.keys = &keys_;
      resume_.same_keys = its_keys.is(keys);
    }
    resume = &resume_;
  }

  const Resume* resume = nullptr;
  nb::handle ids_object() const { return ids_object_; }
  BlockIds ids() const { return ids_->values(); }

 private:
  Resume resume_;
  KeyBytes keys_;
  nb::handle ids_object_;
  std::optional<IdsArgument> ids_;
};

nb::tuple match(const Directory& self, nb::handle name, nb::handle keys, nb::handle session) {
  const SessionArgument argument(session, keys);
  const Directory::Found found =
      self.match(name_argument(name), keys_argument(keys), argument.resume);
  nb::object ids;
  if (found.resumed && found.resumed == found.blocks) {
    ids = nb::borrow(argument.ids_object());
  } else {
    IdsResult result(found.blocks);
    if (found.resumed) std::copy_n(argument.ids().data(), found.resumed, result.data());
    self.read(found, found.resumed, result.data() + found.resumed);
    ids = result.array();
  }
  if (!found.blocks) return nb::make_tuple(ids, kNoBlock, 0);
  std::int32_t last = 0;
  self.read(found, found.blocks - 1, &last);
  return nb::make_tuple(ids, last, self.insert_of(last));
}

nb::object insert(Directory& self, nb::handle name, nb::handle keys, nb::handle first,
                  nb::handle ids, nb::handle session) {
  const SessionArgument argument(session, keys);
  const IdsArgument given(ids, "block ids");
  const std::vector<std::int32_t> present =
      self.insert(name_argument(name), keys_argument(keys), integer_argument(first),
                  given.values(), argument.resume);
  if (present.empty()) return nb::borrow(ids);
  IdsResult result(given.values());
  std::copy(present.begin(), present.end(), result.data());
  return result.array();
}

// Of keys that are paths of one block: as many as there are.
std::size_t paths_of(const Directory& self, KeyBytes keys) {
  if (keys.size() % self.key_bytes() == 0) return keys.size() / self.key_bytes();
  throw ProtocolError("keys must be a whole number of " + std::to_string(self.key_bytes()) +
                      "-byte block keys; got " + std::to_string(keys.size()) + " bytes");
}

KeyBytes path_at(const Directory& self, KeyBytes keys, std::size_t at) {
  return keys.subspan(at * self.key_bytes(), self.key_bytes());
}

nb::object match_each(const Directory& self, nb::handle name, nb::handle keys) {
  const std::string_view space = name_argument(name);
  const KeyBytes paths = keys_argument(keys);
  const std::size_t count = paths_of(self, paths);
  IdsResult result(count);
  for (std::size_t at = 0; at < count; ++at) {
    const Directory::Found found = self.match(space, path_at(self, paths, at), nullptr);
    result.data()[at] = kNoBlock;
    if (found.blocks) self.read(found, 0, result.data() + at);
  }
  return result.array();
}

nb::object insert_each(Directory& self, nb::handle name, nb::handle keys, nb::handle ids) {
  const std::string_view space = name_argument(name);
  const KeyBytes paths = keys_argument(keys);
  const IdsArgument given(ids, "block ids");
  if (paths_of(self, paths) != given.values().size()) {
    throw ProtocolError("each path of one block takes one id");
  }
  IdsResult result(given.values());
  for (std::size_t at = 0; at < given.values().size(); ++at) {
    const std::vector<std::int32_t> present = self.insert(
        space, path_at(self, paths, at), 0, given.values().subspan(at, 1), nullptr);
    if (!present.empty()) result.data()[at] = present[0];
  }
  return result.array();
}

nb::object remove_leaves(Directory& self, nb::handle blocks) {
  const IdsArgument given(blocks, "blocks");
  const std::vector<std::uint8_t> removed = self.remove_leaves(given.values());
  return FlagsResult(std::span(removed)).array();
}

nb::tuple outline(const Directory& self, nb::handle names, std::int64_t max_blocks,
                  std::int64_t most_parts, std::int64_t most_blocks) {
  std::vector<std::string> given;
  if (!names.is_none()) {
    for (const nb::handle name : names) given.emplace_back(name_argument(name));
  }
  if (max_blocks < 0 || most_parts < 0 || most_blocks < 0) {
    throw ProtocolError("an outline takes bounds that are 0 or more");
  }
  const Outline made = self.outline(names.is_none() ? nullptr : &given, max_blocks, most_parts);
  std::vector<std::int32_t> parents, blocks, weights, counts, samples;
  for (std::size_t at = 0; at < made.parts.size(); ++at) {
    const OutlinePart& part = made.parts[at];
    const std::vector<std::int32_t> some = made.blocks_of(self.nodes(), at, most_blocks);
    parents.push_back(part.parent);
    blocks.push_back(static_cast<std::int32_t>(part.blocks));
    weights.push_back(static_cast<std::int32_t>(std::lround(part.weight)));
    counts.push_back(static_cast<std::int32_t>(some.size()));
    samples.insert(samples.end(), some.begin(), some.end());
  }
  return nb::make_tuple(ids_of(parents), ids_of(blocks), ids_of(weights), ids_of(samples),
                        ids_of(counts), made.total, made.exact);
}

void bind_tree(nb::module_& module) {
  nb::class_<Directory>(module, "Directory")
      .def(nb::init<std::int64_t, std::int64_t>(), nb::arg("key_bytes"), nb::arg("run_bytes"))
      .def("__len__", &Directory::size)
      .def("__contains__",
           [](const Directory& self, nb::handle block) {
             return self.contains(integer_argument(block));
           })
      .def_prop_ro("node_count", &Directory::node_count)
      .def("match", &match, nb::arg("namespace"), nb::arg("keys"), nb::arg("session").none())
      .def("insert", &insert, nb::arg("namespace"), nb::arg("keys"), nb::arg("first"),
           nb::arg("ids"), nb::arg("session").none())
      .def("match_each", &match_each, nb::arg("namespace"), nb::arg("keys"))
      .def("insert_each", &insert_each, nb::arg("namespace"), nb::arg("keys"), nb::arg("ids"))
      .def("is_leaf",
           [](const Directory& self, nb::handle block) {
             return self.is_leaf(integer_argument(block));
           })
      .def("parent",
           [](const Directory& self, nb::handle block) {
             return self.parent(integer_argument(block));
           })
      .def("remove_leaf",
           [](Directory& self, nb::handle block) { self.remove_leaf(integer_argument(block)); })
      .def("remove_leaves", &remove_leaves)
      .def("remove_subtree",
           [](Directory& self, nb::handle block) {
             return ids_of(self.remove_subtree(integer_argument(block)));
           })
      .def("outline", &outline, nb::arg("namespaces").none(), nb::arg("max_blocks"),
           nb::arg("most_parts"), nb::arg("most_blocks"))
      .def("check", &Directory::check)
      .def("dump", [](const Directory& self) {
        const std::string told = self.dump();
        return nb::bytes(told.data(), told.size());
      });
}

// What `of` says of each block.
template <typename Result, typename Of>
nb::object of_each(nb::handle blocks, Of of) {
  const IdsArgument given(blocks, "blocks");
  Result result(given.values().size());
  auto* out = result.data();
  for (const std::int32_t block : given.values()) *out++ = of(block);
  return result.array();
}

nb::object pop(EvictionOrder& self, std::int64_t count, int rank, nb::handle busy) {
  if (busy.is_none()) return ids_of(self.pop(count, rank, {}));
  const FlagsArgument flags(busy, "busy");
  return ids_of(self.pop(count, rank, flags.values()));
}

void bind_order(nb::module_& module) {
  nb::class_<EvictionOrder>(module, "EvictionOrder")
      .def(nb::init<std::int64_t, std::string>(), nb::arg("max_blocks"), nb::arg("hold"))
      .def("count", &EvictionOrder::count)
      .def("contains",
           [](const EvictionOrder& self, nb::handle blocks) {
             return of_each<FlagsResult>(blocks, [&](auto block) { return self.contains(block); });
           })
      .def("holds",
           [](const EvictionOrder& self, nb::handle blocks) {
             return of_each<IdsResult>(blocks, [&](auto block) { return self.holds(block); });
           })
      .def("held",
           [](const EvictionOrder& self, nb::handle blocks) {
             return of_each<FlagsResult>(blocks, [&](auto block) { return self.holds(block) > 0; });
           })
      .def("hold",
           [](EvictionOrder& self, nb::handle blocks) {
             self.hold(IdsArgument(blocks, "blocks").values());
           })
      .def("release",
           [](EvictionOrder& self, nb::handle blocks) {
             return ids_of(self.release(IdsArgument(blocks, "blocks").values()));
           })
      .def("append",
           [](EvictionOrder& self, nb::handle blocks, int rank) {
             self.append(IdsArgument(blocks, "blocks").values(), rank);
           })
      .def("prepend",
           [](EvictionOrder& self, nb::handle blocks, int rank) {
             self.prepend(IdsArgument(blocks, "blocks").values(), rank);
           })
      .def("discard",
           [](EvictionOrder& self, nb::handle blocks) {
             self.discard(IdsArgument(blocks, "blocks").values());
           })
      .def("pop", &pop, nb::arg("count"), nb::arg("rank"), nb::arg("busy") = nb::none())
      .def("pop_newest",
           [](EvictionOrder& self, std::int64_t count, int rank) {
             return ids_of(self.pop_newest(count, rank));
           })
      .def("peek", [](const EvictionOrder& self, std::int64_t count, int rank) {
        return ids_of(self.peek(count, rank));
      });
}

void bind_counts(nb::module_& module) {
  nb::class_<BlockCounts>(module, "BlockCounts")
      .def(nb::init<std::int64_t, std::string>(), nb::arg("max_blocks"), nb::arg("what"))
      .def_prop_ro("held", &BlockCounts::held)
      .def("of",
           [](const BlockCounts& self, nb::handle blocks) {
             return of_each<IdsResult>(blocks, [&](auto block) { return self.of(block); });
           })
      .def("any",
           [](const BlockCounts& self, nb::handle blocks) {
             return of_each<FlagsResult>(blocks, [&](auto block) { return self.of(block) > 0; });
           })
      .def("add",
           [](BlockCounts& self, nb::handle blocks) {
             return ids_of(self.add(IdsArgument(blocks, "blocks").values()));
           })
      .def("take_away", [](BlockCounts& self, nb::handle blocks) {
        return ids_of(self.take_away(IdsArgument(blocks, "blocks").values()));
      });
}

}  // namespace

void bind_directory(nb::module_& module) {
  bind_tree(module);
  bind_order(module);
  bind_counts(module);
}

}  // namespace forebay
