#!/usr/bin/env bash
# nvcc and the static runtime, into a manylinux_2_28 container.
#   install-cuda.sh 12.9
set -euo pipefail
version=${1/./-}
machine=$(uname -m)
repository=https://developer.download.nvidia.com/compute/cuda/repos/rhel8/${machine/aarch64/sbsa}
dnf config-manager --add-repo "$repository/cuda-rhel8.repo"
dnf install -y "cuda-nvcc-$version" "cuda-cudart-devel-$version"
ln -sfn "/usr/local/cuda-$1" /usr/local/cuda
