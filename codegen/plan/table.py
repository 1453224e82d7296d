"""The table of routes: every way that the planner weighs. Of equal estimates the earlier row wins."""

from codegen.plan.conv_direct.route import CONV_DIRECT
from codegen.plan.conv_gemm.route import CONV_GEMM
from codegen.plan.conv_product_sm90a.route import CONV_PRODUCT_SM90A
from codegen.plan.conv_sm80.route import CONV_SM80
from codegen.plan.conv_sm90a.route import CONV_SM90A
from codegen.plan.cpu.route import CPU
from codegen.plan.gemm.route import GEMM
from codegen.plan.gemm_sm90a.route import GEMM_SM90A
from codegen.plan.library.route import LIBRARY
from codegen.plan.product_norm.route import CONV_DIRECT_NORM, CONV_PRODUCT_NORM

ROUTES = (CPU, LIBRARY, GEMM, CONV_SM80, CONV_GEMM, GEMM_SM90A, CONV_SM90A, CONV_PRODUCT_SM90A, CONV_DIRECT, CONV_PRODUCT_NORM, CONV_DIRECT_NORM)
