// A device of PyTorch that is no CPU: its memory is the host's, and the CPU
// computes on copies. Tensors of the host beside its own are refused, as a real
// device refuses them.
#include <torch/extension.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

namespace {

constexpr auto kKind = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kKind, 0);

struct Allocator final : at::Allocator {
  static void remove(void* pointer) { c10::free_cpu(pointer); }
  at::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    return {data, data, &remove, kDevice};
  }
  at::DeleterFnPtr raw_deleter() const override { return &remove; }
  void copy_data(void* to, const void* from, std::size_t n) const final {
    default_copy_data(to, from, n);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(kKind, &allocator);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kKind> {
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    static int any;
    *event = &any;
  }
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return the_stream();
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return the_stream();
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return the_stream();
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return the_stream();
  }
  static c10::Stream the_stream() {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(uint64_t seed) : at::CPUGeneratorImpl(seed) {
    device_ = kDevice;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(c10::kCPU);
  }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator one = at::make_generator<Generator>(0);
    return one;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>(c10::default_rng_seed_val);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage,
                              size_t bytes) const override {
    at::DataPtr data = allocator.allocate(bytes);
    if (bytes && storage.nbytes())
      memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

at::Tensor on_cpu(const at::Tensor& t) {
  if (t.device().is_cpu()) return t;
  at::Tensor found = at::from_blob(
      const_cast<void*>(t.unsafeGetTensorImpl()->data()), t.sizes(),
      t.strides(), t.options().device(c10::kCPU).requires_grad(false));
  if (t.is_conj()) found = found.conj();
  if (t.is_neg()) found = found._neg_view();
  return found;
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>,
                         std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size,
                      c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool) {
  on_cpu(dst).copy_(on_cpu(self));
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  on_cpu(dst).copy_(on_cpu(self));
  return dst;
}

at::Scalar local_scalar(const at::Tensor& self) {
  return on_cpu(self).item();
}

at::Tensor& set_source(at::Tensor& result, at::Storage storage, int64_t offset,
                       c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(result, storage, offset, size, stride);
}

at::Tensor on_device(const at::Tensor& t) {
  return t.defined() ? t.to(kDevice) : t;
}

at::Tensor convolution(const at::Tensor& x, const at::Tensor& w,
                       const std::optional<at::Tensor>& b,
                       c10::IntArrayRef stride, c10::IntArrayRef padding,
                       c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  std::optional<at::Tensor> bias;
  if (b && b->defined()) bias = on_cpu(*b);
  return on_device(at::convolution(on_cpu(x), on_cpu(w), bias, stride, padding,
                                   dilation, transposed, output_padding,
                                   groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& g, const at::Tensor& x, const at::Tensor& w,
    c10::IntArrayRef stride, c10::IntArrayRef padding,
    c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  std::vector<int64_t> bias{w.size(transposed ? 1 : 0) *
                            (transposed ? groups : 1)};
  auto [a, b, c] = at::convolution_backward(
      on_cpu(g), on_cpu(x), on_cpu(w), c10::IntArrayRef(bias), stride, padding,
      dilation, transposed, output_padding, groups, mask);
  return {on_device(a), on_device(b), on_device(c)};
}

void refuse(const c10::OperatorHandle& op) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, in ",
              op.schema().operator_name());
}

// What a real device refuses: tensors of the host beside its own.
void check_devices(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string name = op.schema().operator_name().name;
  if (name.find("aten::index") == 0 || name.find("aten::_index") == 0 ||
      name.find("aten::_unsafe_index") == 0)
    return;
  const auto& arguments = op.schema().arguments();
  const auto count = arguments.size();
  for (size_t i = 0; i < count; ++i) {
    auto& value = torch::jit::peek(*stack, i, count);
    const bool writes = arguments[i].alias_info() &&
                        arguments[i].alias_info()->isWrite();
    if (value.isTensor()) {
      const auto& t = value.toTensor();
      if (t.defined() && t.device().is_cpu() && (t.dim() > 0 || writes))
        refuse(op);
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector())
        if (t.defined() && t.device().is_cpu()) refuse(op);
    }
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_devices(op, stack);
  const auto count = op.schema().arguments().size();
  for (size_t i = 0; i < count; ++i) {
    auto& value = torch::jit::peek(*stack, i, count);
    if (value.isGenerator()) {
      auto generator = value.toGenerator();
      if (generator.defined() && generator.device() == kDevice) {
        // A generator of the CPU that goes on where this one is.
        auto inner = at::make_generator<at::CPUGeneratorImpl>();
        inner.set_state(generator.get_state());
        value = inner;
        at::native::cpu_fallback(op, stack);
        generator.set_state(inner.get_state());
        return;
      }
    }
  }
  at::native::cpu_fallback(op, stack);
}

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("view.dtype", TORCH_FN(at::native::view_dtype));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("alias", TORCH_FN(at::native::alias));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Copies see themselves what a tensor is marked as: they resolve the marks.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}
