//! Attention from Rust, without crates, through the C ABI; checked against the formula.
//!
//!     rustc --edition 2021 attention.rs -L native=$(pkg-config --variable=libdir anyflash)

use std::ffi::{c_void, CStr};
use std::os::raw::c_char;
use std::process::exit;
use std::ptr::null;

// dlpack.h
#[repr(C)]
struct DLTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    dtype_code: u8,
    dtype_bits: u8,
    dtype_lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// anyflash.h: the first fields of anyflash_forward_options. `size` tells the library which ones we
/// know, so that no mirror of the rest is needed: they have their defaults.
#[repr(C)]
struct ForwardOptions {
    size: usize,
    softmax_scale: f64,
    has_softmax_scale: i32,
    causal: i32,
    num_threads: i32,
    cpu_isa: i32,
    stream: *mut c_void,
}

#[link(name = "anyflash")]
extern "C" {
    fn anyflash_forward_workspace_size(
        q: *const DLTensor,
        k: *const DLTensor,
        v: *const DLTensor,
        out: *const DLTensor,
        lse: *const DLTensor,
        options: *const ForwardOptions,
        bytes: *mut usize,
    ) -> i32;
    fn anyflash_forward(
        q: *const DLTensor,
        k: *const DLTensor,
        v: *const DLTensor,
        out: *const DLTensor,
        lse: *const DLTensor,
        options: *const ForwardOptions,
        workspace: *mut c_void,
        workspace_bytes: usize,
    ) -> i32;
    fn anyflash_last_error() -> *const c_char;
    fn anyflash_version() -> *const c_char;
}

fn text(pointer: *const c_char) -> String {
    unsafe { CStr::from_ptr(pointer) }
        .to_string_lossy()
        .into_owned()
}

fn checked(status: i32) -> Result<(), String> {
    match status {
        0 => Ok(()),
        _ => Err(text(unsafe { anyflash_last_error() })),
    }
}

/// A contiguous float32 tensor (batch, rows, heads, head_dim).
struct Tensor {
    shape: [i64; 4],
    data: Vec<f32>,
}

impl Tensor {
    fn new(shape: [i64; 4], value: impl Fn(usize) -> f32) -> Tensor {
        let count = shape.iter().product::<i64>() as usize;
        Tensor {
            shape,
            data: (0..count).map(value).collect(),
        }
    }

    /// A view for one call; what it points to lives in `self`.
    fn view(&self) -> DLTensor {
        DLTensor {
            data: self.data.as_ptr() as *mut c_void,
            device_type: 1, // kDLCPU
            device_id: 0,
            ndim: 4,
            dtype_code: 2, // kDLFloat
            dtype_bits: 32,
            dtype_lanes: 1,
            shape: self.shape.as_ptr(),
            strides: null(),
            byte_offset: 0,
        }
    }

    fn at(&self, batch: usize, row: usize, head: usize, column: usize) -> f64 {
        let [_, rows, heads, columns] = self.shape.map(|extent| extent as usize);
        self.data[((batch * rows + row) * heads + head) * columns + column] as f64
    }
}

/// `out` is written: hence &mut.
fn forward(q: &Tensor, k: &Tensor, v: &Tensor, out: &mut Tensor) -> Result<(), String> {
    let options = ForwardOptions {
        size: std::mem::size_of::<ForwardOptions>(),
        softmax_scale: 0.0,
        has_softmax_scale: 0,
        causal: 1,
        num_threads: 0,
        cpu_isa: 0,
        stream: std::ptr::null_mut(),
    };
    let (q, k, v) = (q.view(), k.view(), v.view());
    let mut result = out.view();
    result.data = out.data.as_mut_ptr() as *mut c_void;
    let mut bytes = 0;
    unsafe {
        checked(anyflash_forward_workspace_size(
            &q,
            &k,
            &v,
            &result,
            null(),
            &options,
            &mut bytes,
        ))?;
        let mut workspace = vec![0u8; bytes];
        let memory = workspace.as_mut_ptr() as *mut c_void;
        checked(anyflash_forward(
            &q,
            &k,
            &v,
            &result,
            null(),
            &options,
            memory,
            bytes,
        ))
    }
}

/// The largest difference from softmax(q k^T / sqrt(head_dim)) v under a causal mask.
fn difference(q: &Tensor, k: &Tensor, v: &Tensor, out: &Tensor) -> f64 {
    let [batch, rows, heads, columns] = q.shape.map(|extent| extent as usize);
    let (keys, group) = (k.shape[1] as usize, heads / k.shape[2] as usize);
    let mut largest: f64 = 0.0;
    for (b, i, h) in
        (0..batch * rows * heads).map(|n| (n / heads / rows, n / heads % rows, n % heads))
    {
        let weights: Vec<f64> = (0..=i + keys - rows)
            .map(|j| {
                (0..columns)
                    .map(|d| q.at(b, i, h, d) * k.at(b, j, h / group, d))
                    .sum()
            })
            .map(|score: f64| (score / (columns as f64).sqrt()).exp())
            .collect();
        let total: f64 = weights.iter().sum();
        for d in 0..columns {
            let weighted = weights
                .iter()
                .enumerate()
                .map(|(j, w)| w * v.at(b, j, h / group, d));
            let expected = weighted.sum::<f64>() / total;
            largest = largest.max((out.at(b, i, h, d) - expected).abs());
        }
    }
    largest
}

fn run() -> Result<bool, String> {
    let q = Tensor::new([2, 5, 4, 16], |i| (3.0 * i as f32).sin());
    let k = Tensor::new([2, 70, 2, 16], |i| (5.0 * i as f32).cos());
    let v = Tensor::new([2, 70, 2, 16], |i| (7.0 * i as f32).sin());
    let mut out = Tensor::new(q.shape, |_| f32::NAN);
    forward(&q, &k, &v, &mut out)?;
    let error = difference(&q, &k, &v, &out);
    println!(
        "anyflash {}: difference {:.1e}",
        text(unsafe { anyflash_version() }),
        error
    );

    let wrong = Tensor::new([2, 70, 3, 16], |_| 0.0);
    let refused = forward(&q, &wrong, &wrong, &mut out);
    println!("{:?}", refused);
    Ok(error < 2e-6 && matches!(refused, Err(message) if message.contains("k has 3 heads")))
}

fn main() {
    match run() {
        Ok(true) => {}
        Ok(false) => exit(1),
        Err(message) => {
            eprintln!("{}", message);
            exit(1);
        }
    }
}
