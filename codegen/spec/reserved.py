"""Words that a spec must not use as names: the emitted C++, CUDA or Python already gives them a meaning."""

CPP = frozenset(
    """
    alignas alignof asm auto bool break case catch char class const constexpr continue default delete do double else enum explicit export extern
    false float for friend goto if inline int long mutable namespace new noexcept nullptr operator private protected public register return short
    signed sizeof static struct switch template this throw true try typedef typename union unsigned using virtual void volatile while
    """.split()
)

# What a launcher names, whose parameters have the names of bare parameters of the module.
LAUNCHER = frozenset(
    """
    Arguments Box CUtensorMap DeviceScope arguments attributes config const_cast encode input_box map_input map_weight read_wide reinterpret_cast scope
    static_cast uintptr_t weight_box
    """.split()
)

# Names of tensors and modules in the emitted files.
OURS = frozenset("x y t0 workspace row_scales tile_statistics self device stream super model runtime codegen torch nn generated main std".split())

# Names that the emitted constructors read, and the parameter of the runtime's: an argument of one of them would hide it. A test derives them from the text.
CONSTRUCTOR = frozenset("PACKAGE ValueError isinstance list package tuple".split())

# Names that the emitted forwards read: an input of one of them would hide it. A test derives them from the text.
FORWARD = frozenset("F getattr min".split())

# Attributes of torch.nn.Module and of the runtime's module, as of torch 2.13; a test compares with the torch that is present.
MODULE = frozenset(
    """
    T_destination add_module apply bfloat16 buffers build call_super_init children compile cpu cuda differentiate_by_reference double dump_patches eval extra_repr
    float forward get_buffer get_extra_state get_parameter get_submodule half ipu load_state_dict modules mtia named_buffers named_children
    named_modules named_parameters parameters prepare prepared_bytes register_backward_hook register_buffer register_forward_hook register_forward_pre_hook
    register_full_backward_hook register_full_backward_pre_hook register_load_state_dict_post_hook register_load_state_dict_pre_hook
    register_module register_parameter register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state
    set_submodule share_memory state_dict to to_empty train training type xpu zero_grad
    """.split()
)

# Buffers of a call, which the runtime finds by name beside the parameters: one of the same name would be written over.
BUFFERS = frozenset(
    "kept norm_statistics part_statistics pixels row_scales sliced_sums t0 tile_statistics weight_rows weight_split weight_steps weight_unscale x_counts x_largest x_pixels x_rows x_split x_unscale".split()
)

RESERVED = CPP | LAUNCHER | OURS | CONSTRUCTOR | BUFFERS | MODULE
