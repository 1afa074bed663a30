//! What a plan needs of TLS, from files that are read anew each time: paths that are the same say
//! nothing about what is in them.

use std::sync::Arc;

use super::{Issued, Originator, Resumption, Terminator, TlsError};
use crate::config::plan::{Bind, Plan, Scheme};

/// What a plan needs.
#[derive(Debug)]
pub struct Material {
    /// For each listener.
    pub listeners: Vec<Option<Arc<Terminator>>>,
    /// For each pool.
    pub pools: Vec<Option<Arc<Originator>>>,
}

/// Something of it cannot be had.
#[derive(Debug)]
pub struct MaterialError {
    /// The listener or pool that needs it.
    pub whose: String,
    /// Why not.
    pub errors: Vec<TlsError>,
}

impl std::fmt::Display for MaterialError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let errors: Vec<_> = self.errors.iter().map(ToString::to_string).collect();
        write!(f, "{}: {}", self.whose, errors.join("; "))
    }
}

impl Material {
    /// Reads what `plan` names. `issued`: for each listener, where what a CA issues is to be had.
    ///
    /// # Errors
    /// Whose files are wrong, and why.
    pub fn read(
        plan: &Plan,
        resumption: &Resumption,
        issued: &[Option<Arc<Issued>>],
    ) -> Result<Self, MaterialError> {
        let listeners = plan.listeners.iter().enumerate().map(|(ix, listener)| {
            let Some(tls) = &listener.tls else { return Ok(None) };
            let whose = || format!("listener {}", listener.name);
            if let Bind::Unix(path) = &listener.bind {
                let message = format!("TLS cannot be spoken at unix:{}", path.display());
                let help = Some("give it an address and a port".to_owned());
                let errors = vec![TlsError { file: Some(path.clone()), message, help }];
                return Err(MaterialError { whose: whose(), errors });
            }
            let terminator =
                Terminator::new(tls, resumption, issued.get(ix).and_then(Option::as_ref));
            let told = |errors| MaterialError { whose: whose(), errors };
            terminator.map(|terminator| Some(Arc::new(terminator))).map_err(told)
        });
        let listeners = listeners.collect::<Result<_, _>>()?;
        let pools = plan.pools.iter().map(|pool| {
            if pool.upstreams.iter().all(|upstream| upstream.scheme != Scheme::Https) {
                return Ok(None);
            }
            let originator = Originator::new(&pool.tls, pool.protocol);
            let told = |errors| MaterialError { whose: format!("pool {}", pool.name), errors };
            originator.map(|originator| Some(Arc::new(originator))).map_err(told)
        });
        Ok(Self { listeners, pools: pools.collect::<Result<_, _>>()? })
    }
}
